//! A request that is sent on a second session if the first does not answer in time.

use std::{
    future::Future,
    pin::pin,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use chrono::{DateTime, Utc};
use tokio::sync::Notify;

use crate::{
    session::{
        loan::{Loan, Patience},
        sessions::Sessions,
        time::Instant,
    },
    store::{Database, Reply, TooLate, failure::Failure},
};

/// A statement that may be sent twice.
pub(crate) trait Request<DB: Database>: Sync {
    type Reply: Send;

    /// Sends it. What it grants or extends, it does not grant or extend after `not_after`, on the
    /// server's clock.
    fn send(
        &self,
        conn: &mut DB::Connection,
        not_after: Option<DateTime<Utc>>,
    ) -> impl Future<Output = Reply<Self::Reply>> + Send;

    /// Returns the server's clock, if the reply shows that the limit had passed there.
    fn too_late(&self, _reply: &Self::Reply, _not_after: Option<DateTime<Utc>>) -> Option<TooLate> {
        None
    }

    /// Returns whether the reply settles the request. A row that one request skipped may be locked
    /// by the other request.
    fn is_settled(&self, _reply: &Self::Reply) -> bool {
        true
    }

    /// Returns what two replies tell together. The earlier one does not settle the request.
    fn combined(&self, _earlier: Self::Reply, later: Self::Reply) -> Self::Reply {
        later
    }
}

/// The result of a request.
pub(crate) struct Exchange<T, E = Failure> {
    pub reply: Result<T, E>,
    /// A request was sent, and it is unknown whether it was carried out.
    pub unanswered: bool,
}

/// A reply, and when the request that was answered was sent.
pub(crate) struct Answer<T> {
    pub sent: Instant,
    pub reply: T,
}

/// Sends the request as [`exchange`] does, on `session` first. Its silence depends on how long
/// replies usually take.
pub(crate) async fn exchange_on<DB: Database, R: Request<DB>>(
    session: Loan<DB>,
    sessions: &Sessions<DB>,
    limit: Instant,
    request: &R,
) -> Exchange<Answer<R::Reply>> {
    let silence = ((limit - Instant::now()) / 10).max(4 * sessions.usual_reply());
    exchange(Some(session), sessions, silence, limit, request).await
}

/// Sends the request, on `session` if there is one. If it has no reply after `silence`, it is sent
/// on another session too, and the first of the two replies that settles it counts. The other
/// session is closed only then. A database of one writer answers, or waits for another process, as
/// it would on every session.
pub(crate) async fn exchange<DB: Database, R: Request<DB>>(
    session: Option<Loan<DB>>,
    sessions: &Sessions<DB>,
    silence: Duration,
    limit: Instant,
    request: &R,
) -> Exchange<Answer<R::Reply>> {
    let (silent, first_sent, second_sent) = (Notify::new(), AtomicBool::new(false), AtomicBool::new(false));
    let patience = Patience { silence, limit, silent: &silent };
    let mut first = pin!(send_once(session, sessions, patience, request, &first_sent));
    let replied = tokio::select! {
        biased;
        reply = &mut first => Some(reply),
        () = silent.notified(), if !DB::ONE_WRITER => None,
    };
    if let Some(reply) = replied {
        return Exchange { unanswered: is_unanswered(&reply), reply };
    }
    let mut second = pin!(send_once(None, sessions, patience, request, &second_sent));
    let (reply, other) = tokio::select! {
        reply = &mut first => (reply, Some(second)),
        reply = &mut second => (reply, None),
    };
    let both_sent = first_sent.load(Ordering::Relaxed) && second_sent.load(Ordering::Relaxed);
    if reply.as_ref().is_ok_and(|answer| request.is_settled(&answer.reply)) {
        return Exchange { reply, unanswered: both_sent };
    }
    let (earlier, later) = match other {
        Some(second) => (reply, second.await),
        // The server refused the second, which may have met the first. The caller asks once more.
        None if matches!(&reply, Err(failure) if !failure.is_unanswered() && both_sent) => {
            return Exchange { reply: Err(Failure::NoReply), unanswered: true };
        }
        None => (reply, first.await),
    };
    let unanswered = is_unanswered(&earlier) || is_unanswered(&later);
    let reply = match (earlier, later) {
        (Ok(earlier), Ok(later)) => {
            let sent = earlier.sent.min(later.sent);
            Ok(Answer { sent, reply: request.combined(earlier.reply, later.reply) })
        }
        (Ok(earlier), Err(_)) => Ok(earlier),
        // What is unknown is told, whatever the other one says.
        (Err(earlier), Err(later)) if unanswered && !later.is_unanswered() => Err(earlier),
        (Err(earlier), Err(Failure::NoConnection(_))) => Err(earlier),
        (_, later) => later,
    };
    Exchange { reply, unanswered }
}

async fn send_once<DB: Database, R: Request<DB>>(
    session: Option<Loan<DB>>,
    sessions: &Sessions<DB>,
    patience: Patience<'_>,
    request: &R,
    is_sent: &AtomicBool,
) -> Result<Answer<R::Reply>, Failure> {
    let limit = patience.limit;
    let mut conn = match session {
        Some(session) => session,
        None => sessions.take_with(patience).await?,
    };
    let line = conn.line();
    loop {
        let (sent, not_after) = (Instant::now(), conn.not_after(limit));
        if sent >= limit {
            // A statement that is sent and given up at once might still be carried out. Other
            // transactions had the row locked until the limit.
            conn.give_back();
            return Err(Failure::Undone);
        }
        is_sent.store(true, Ordering::Relaxed);
        let reply = patience.reply(line.as_deref(), sent, request.send(conn.get(), not_after)).await;
        if let (Ok(_), Some(line)) = (&reply, &line) {
            line.replied(sent.elapsed());
        }
        let (loan, reply) = conn.proceed(reply)?;
        conn = loan;
        match request.too_late(&reply, not_after) {
            // The server's clock was stepped forward.
            Some(TooLate { now }) if Instant::now() < limit => conn.set_clock(now),
            _ => {
                conn.give_back();
                return Ok(Answer { sent, reply });
            }
        }
    }
}

/// Returns whether it is unknown what was done.
fn is_unanswered<T>(reply: &Result<T, Failure>) -> bool {
    reply.as_ref().is_err_and(Failure::is_unanswered)
}
