//! Tokens of forms. A change is made only if its form came with the token that this server gave to
//! the same browser, which another site cannot read.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use axum::http::{HeaderMap, header, uri::Authority};
use uuid::Uuid;

use crate::ui::passwords::is_same;

/// The oldest session ends when there are more.
const MAX_SESSIONS: usize = 1_000;

#[derive(Debug, Default)]
pub struct Sessions(Mutex<VecDeque<Session>>);

#[derive(Clone, Debug)]
struct Session {
    id: String,
    token: String,
}

/// The token for a form, and the cookie to set if the browser has no session yet.
pub struct Given {
    pub token: String,
    pub cookie: Option<String>,
}

impl Sessions {
    /// Returns the token of the browser's session, which is begun if there is none.
    pub fn token(&self, headers: &HeaderMap) -> Given {
        if let Some(session) = self.find(headers) {
            return Given { token: session.token, cookie: None };
        }
        let session = Session { id: random(), token: random() };
        // A proxy that ends TLS says so.
        let is_tls = headers.get("x-forwarded-proto").is_some_and(|proto| proto == "https");
        let secure = if is_tls { "; Secure" } else { "" };
        let cookie = format!("{}={}; Path=/; HttpOnly; SameSite=Strict{secure}", cookie_name(headers), session.id);
        let given = Given { token: session.token.clone(), cookie: Some(cookie) };
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sessions.len() >= MAX_SESSIONS {
            sessions.pop_front();
        }
        sessions.push_back(session);
        given
    }

    /// Returns whether the token is that of the browser's session.
    pub fn accepts(&self, headers: &HeaderMap, token: &str) -> bool {
        self.find(headers).is_some_and(|session| is_same(&session.token, token))
    }

    fn find(&self, headers: &HeaderMap) -> Option<Session> {
        let sent = headers.get_all(header::COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
        let mut pairs = sent.flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.trim().split_once('='));
        let own = cookie_name(headers);
        let (_, id) = pairs.find(|(name, _)| *name == own)?;
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.iter().find(|session| is_same(&session.id, id)).cloned()
    }
}

/// Returns the name of the cookie. It has the port by which the browser reaches this server: a
/// browser sends a cookie to all ports of a host, and another server on that host has cookies too.
fn cookie_name(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let port = host.and_then(|host| host.parse::<Authority>().ok()).and_then(|host| host.port_u16());
    port.map_or_else(|| "rowlock_ui".to_owned(), |port| format!("rowlock_ui_{port}"))
}

/// Returns 244 random bits.
fn random() -> String {
    format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple())
}
