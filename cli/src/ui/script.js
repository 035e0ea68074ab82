// Keeps a page up to date: the server sends the part of the page that shows the database.
"use strict";

const live = document.getElementById("live");
const offline = document.getElementById("offline");
let events = null;
let warning = null;
let isPressed = false;

// Times are those of the viewer's clock. The server knows UTC alone.
const clock = new Intl.DateTimeFormat(undefined, { weekday: "short", hour: "2-digit", minute: "2-digit" });

function showOwnTimes() {
  for (const time of live.querySelectorAll("time.viewer")) {
    time.textContent = `${clock.format(new Date(time.dateTime))} here`;
  }
}

// Names links and headings of details by their address or id, and by their number among equal ones.
function names() {
  const [named, seen] = [new Map(), new Map()];
  for (const one of live.querySelectorAll("a, summary")) {
    const name = one.getAttribute("href") ?? one.id;
    seen.set(name, (seen.get(name) ?? 0) + 1);
    named.set(`${name} ${seen.get(name)}`, one);
  }
  return named;
}

// What has the focus or is unfolded stays so, if the new part has it.
function show(text) {
  const [before, focused] = [names(), document.activeElement];
  live.innerHTML = text;
  showOwnTimes();
  for (const [name, one] of names()) {
    const former = before.get(name);
    if (former?.parentElement.open) one.parentElement.open = true;
    if (former === focused) one.focus({ preventScroll: true });
  }
}

// Text that is selected is about to be copied.
function isSelected() {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && live.contains(selection.anchorNode);
}

function open() {
  const address = new URL(live.dataset.events, location.href);
  address.searchParams.set("zone", clock.resolvedOptions().timeZone);
  events = new EventSource(address);
  events.onopen = () => {
    clearTimeout(warning);
    warning = null;
    offline.hidden = true;
  };
  events.onmessage = (event) => {
    if (!isPressed && !isSelected()) show(JSON.parse(event.data));
  };
  events.onerror = () => {
    // A connection that comes back at once is nothing to tell.
    warning ??= setTimeout(() => { offline.hidden = false; }, 2000);
    // A browser does not try again after an answer that is an error.
    if (events.readyState === EventSource.CLOSED) setTimeout(reopen, 5000);
  };
}

function reopen() {
  events?.close();
  if (!document.hidden) open();
}

if (live !== null) {
  showOwnTimes();
  // A link that is replaced between press and release would not be followed.
  live.addEventListener("pointerdown", () => { isPressed = true; });
  for (const end of ["pointerup", "pointercancel"]) {
    document.addEventListener(end, () => setTimeout(() => { isPressed = false; }, 50));
  }
  // A browser keeps few connections to one server: pages in the background give theirs back.
  document.addEventListener("visibilitychange", reopen);
  window.addEventListener("pagehide", () => events?.close());
  window.addEventListener("pageshow", (event) => { if (event.persisted) reopen(); });
  reopen();
}
