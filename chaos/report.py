"""The tables of scripts/chaos, in Markdown."""


def seconds(value):
    if value is None:
        return "-"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def jobs_table(results):
    """`results`: (peer, figures or the reason why there are none)."""
    head = ["jobs of", "ticks", "lost", "twice", "beside", "delay p50", "p99", "longest",
            "no run after a kill", "after a restart", "statements a second", "missed ticks"]
    rows = []
    for peer, figures in results:
        if isinstance(figures, str):
            rows.append([peer.name, f"not run: {figures}"] + [""] * (len(head) - 2))
            continue
        counted = ", ".join(f"{rate:.1f}" + ("" if name == "PostgreSQL" else f" {name}")
                            for name, rate in figures["statements"].items() if rate)
        name = figures["versions"].split(",")[0].split(" (")[0] or peer.name
        rows.append([name, str(figures["ticks"]), str(figures["lost"]), str(figures["twice"]),
                     str(figures["beside"]), *(seconds(figures[name]) for name in
                                               ("p50", "p99", "longest", "after_kill",
                                                "after_restart")),
                     counted, peer.settings["jobs"]["missed"]])
    return table(head, rows)


def locks_table(results):
    head = ["lock", "holds", "two holders, pause", "restart", "lost updates, pause", "restart",
            "refused writes", "longest wait, pause", "restart"]
    rows = []
    for peer, figures in results:
        if isinstance(figures, str):
            rows.append([peer, f"not run: {figures}"] + [""] * (len(head) - 2))
            continue
        pause, restart = figures["pause"], figures["restart"]
        rows.append([peer, str(pause["holds"] + restart["holds"]),
                     str(pause["two_holders"]), str(restart["two_holders"]),
                     str(pause["lost"]), str(restart["lost"]),
                     str(pause["refused"] + restart["refused"]),
                     seconds(pause["longest_wait"]), seconds(restart["longest_wait"])])
    return table(head, rows)
