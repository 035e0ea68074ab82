//! Tokens of forms. A change is made only if its form came with the token that this server gave to
//! the same browser, which another site cannot read.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use axum::http::{HeaderMap, header};
use uuid::Uuid;

use crate::ui::guard::is_same;

const COOKIE: &str = "rowlock_ui";
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
        let cookie = format!("{COOKIE}={}; Path=/; HttpOnly; SameSite=Strict", session.id);
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
        let (_, id) = pairs.find(|(name, _)| *name == COOKIE)?;
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.iter().find(|session| is_same(&session.id, id)).cloned()
    }
}

/// Returns 244 random bits.
fn random() -> String {
    format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple())
}
