//! What passes between the clients and the server, and where their protocols are read.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    time::{sleep, timeout},
};

use super::{Shared, Way};
use crate::pools_sessions;

/// How long the next part of a reply is waited for.
const NEXT_PART: Duration = Duration::from_millis(20);

/// Accepts connections, and passes on what comes on each, as the state says.
pub(super) async fn accept(listener: TcpListener, shared: Shared, server: String) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        let mut number = 0;
        shared.0.send_modify(|state| {
            number = state.accepted;
            state.accepted += 1;
            state.open.insert(number, 0);
        });
        let (passing, server) = (shared.clone(), server.clone());
        tokio::spawn(async move {
            connection(passing.clone(), number, client, server).await;
            passing.0.send_modify(|state| {
                state.open.remove(&number);
            });
        });
    }
}

async fn connection(shared: Shared, number: u64, mut client: TcpStream, server: String) {
    let Ok(mut server) = TcpStream::connect(server).await else { return };
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let pinged = AtomicBool::new(false);
    let requests = pump(&shared, Way::Requests, number, from_client, to_server, &pinged);
    let replies = pump(&shared, Way::Replies, number, from_server, to_client, &pinged);
    let mut states = shared.0.subscribe();
    tokio::select! {
        _ = states.wait_for(|state| number < state.cut_below) => {}
        ((), ()) = async { tokio::join!(requests, replies) } => {}
    }
}

/// Reads a chunk. A server of PostgreSQL sends a reply at once. Pgpool-II sends it in parts, which
/// are read up to the last message.
async fn read(from: &mut ReadHalf<'_>, chunk: &mut [u8], in_parts: bool) -> std::io::Result<usize> {
    const READY_FOR_QUERY: &[u8] = b"Z\0\0\0\x05";
    let mut length = from.read(chunk).await?;
    let is_part = |chunk: &[u8]| !chunk.is_empty() && !chunk[..chunk.len() - 1].ends_with(READY_FOR_QUERY);
    while in_parts && is_part(&chunk[..length]) {
        match timeout(NEXT_PART, from.read(&mut chunk[length..])).await {
            Ok(Ok(more @ 1..)) => length += more,
            _ => break,
        }
    }
    Ok(length)
}

async fn pump(
    shared: &Shared,
    way: Way,
    number: u64,
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    pinged: &AtomicBool,
) {
    let (mut chunk, mut is_first) = (vec![0; 1 << 16], true);
    let in_parts = way == Way::Replies && pools_sessions();
    while let Ok(length @ 1..) = read(&mut from, &mut chunk, in_parts).await {
        let free = match way {
            Way::Requests => {
                shared.0.send_modify(|state| *state.open.entry(number).or_default() += 1);
                if chunk[..length].windows(6).any(|text| text == b"LISTEN") {
                    shared.0.send_modify(|state| state.listeners.push(number));
                }
                if !is_end(&chunk[..length]) {
                    shared.record_held_request(number);
                }
                let ping = is_ping(&chunk[..length]);
                pinged.store(ping, Ordering::SeqCst);
                ping
            }
            // The reply to a ping may arrive in several chunks.
            Way::Replies => pinged.load(Ordering::SeqCst),
        };
        if way == Way::Replies {
            // A second borrow would wait for a writer that waits for the first.
            let (delay, latency) = {
                let state = shared.0.borrow();
                (state.delay, state.latency)
            };
            let delay = if std::mem::take(&mut is_first) { delay.max(latency) } else { latency };
            // A sleep takes a millisecond at least.
            if !delay.is_zero() {
                sleep(delay).await;
            }
        }
        if !free || shared.0.borrow().is_silent(number) {
            shared.pass(way, number).await;
        }
        let replaced = shared.0.borrow().replaced;
        if let Some((text, with)) = replaced {
            let found = |at: &usize| chunk[*at..length].starts_with(text.as_bytes());
            for at in (0..length).filter(found).collect::<Vec<_>>() {
                chunk[at..at + with.len()].copy_from_slice(with.as_bytes());
            }
        }
        let error = shared.0.borrow().failing.filter(|_| way == Way::Replies);
        let end = error.and_then(|text| end_of_error(&chunk[..length], text));
        // A receiver that has closed its end does not stop the sender.
        let _ = to.write_all(&chunk[..end.unwrap_or(length)]).await;
        if let Some(end) = end {
            shared.0.send_modify(|state| {
                state.failing = None;
                state.left[way as usize] = Some(0);
                state.only = Some(vec![number]);
            });
            shared.pass(way, number).await;
            let _ = to.write_all(&chunk[end..length]).await;
        }
    }
    let _ = to.shutdown().await;
}

/// Returns where the message of PostgreSQL ends that is an error with this text.
fn end_of_error(chunk: &[u8], text: &str) -> Option<usize> {
    let mut start = 0;
    while let Some([kind, a, b, c, d]) = chunk.get(start..start + 5) {
        let end = start + 1 + u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        let message = chunk.get(start..end)?;
        if *kind == b'E' && message.windows(text.len()).any(|part| part == text.as_bytes()) {
            return Some(end);
        }
        start = end;
    }
    None
}

/// What a pool sends when a connection is given back (PostgreSQL's Sync alone, MySQL's COM_PING,
/// after a ROLLBACK with which the driver counts down the transaction that a lock has ended), and
/// what a lock sends before it uses a connection of a pool that it shares.
fn is_ping(chunk: &[u8]) -> bool {
    let chunk = match chunk.strip_prefix(b"\x09\0\0\0\x03ROLLBACK") {
        Some([]) => return true,
        Some(rest) => rest,
        None => chunk,
    };
    let begins = |text: &[u8]| chunk.get(5..).is_some_and(|rest| rest.starts_with(text));
    matches!(chunk, [b'S', 0, 0, 0, 4] | [1, 0, 0, 0, 0x0e])
        || begins(b"SELECT now() = statement_timestamp()")
        || begins(b"ROLLBACK AND NO CHAIN NO RELEASE; SELECT CAST(@@autocommit")
}

/// PostgreSQL's Terminate, and MySQL's COM_QUIT.
fn is_end(chunk: &[u8]) -> bool {
    matches!(chunk, [b'X', 0, 0, 0, 4] | [1, 0, 0, 0, 1])
}
