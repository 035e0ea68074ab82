//! Which requests are answered, and what all answers tell the browser.
//!
//! The name in `Host` has to be one of this server's, so that no other site becomes this one by
//! pointing its name here. A program may know the server by another name, as Prometheus does. Two
//! requests are answered under any name: `/metrics` with its token, which no other site has, and
//! `/healthz` of a server that has a token or passwords, which tells only whether the database can
//! be read. `Origin` has to be this server where a browser sends it, and a change has to have it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::{
    body::to_bytes,
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};

use tokio::time::timeout;

use crate::ui::{
    connections::{Arriving, LONGEST},
    guesses::Guesses,
    passwords::{Passwords, is_same},
};

/// The largest form, in bytes.
const LARGEST: usize = 64 * 1024;
pub const HEALTH: &str = "/healthz";
pub const METRICS: &str = "/metrics";

#[derive(Debug, Default)]
pub struct Guard {
    /// Names of this server, beside localhost and IP addresses.
    pub hosts: Vec<String>,
    pub passwords: Option<Passwords>,
    /// What a scrape of the metrics may have instead of a password.
    pub metrics_token: Option<String>,
    pub guesses: Guesses,
}

impl Guard {
    /// Returns whether the request may name the server as it likes.
    fn takes_any_name(&self, request: &Request) -> bool {
        match (request.uri().path(), &self.metrics_token) {
            (HEALTH, token) => token.is_some() || self.passwords.is_some(),
            // A wrong token is refused later, as slowly as a wrong password.
            (METRICS, Some(_)) => sent_token(request).is_some(),
            _ => false,
        }
    }

    /// Returns whether the request needs no name and password of an operator.
    fn is_open(&self, request: &Request) -> bool {
        match (request.uri().path(), &self.metrics_token) {
            (HEALTH, _) => true,
            (METRICS, Some(token)) => sent_token(request).is_some_and(|sent| is_same(sent, token)),
            _ => self.passwords.is_none(),
        }
    }
}

fn sent_token(request: &Request) -> Option<&str> {
    let sent = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?;
    sent.strip_prefix("Bearer ").map(str::trim)
}

/// Who sent a request.
#[derive(Clone, Debug)]
pub struct Who {
    /// The name that came with the password.
    pub name: Option<String>,
    pub from: SocketAddr,
}

/// Answers the request, or says why not.
pub async fn admit(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let headers = request.headers();
    if !host_is_ours(headers, &guard.hosts) && !guard.takes_any_name(&request) {
        let text = "this is not a name of this server: reach it as localhost or by its address, start rowlock ui with --host NAME, or read /metrics with the token of --metrics-token-file";
        return (StatusCode::MISDIRECTED_REQUEST, text).into_response();
    }
    if !origin_is_ours(request.method(), headers) {
        return (StatusCode::FORBIDDEN, "the request came from a page of another site").into_response();
    }
    let Some(from) = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|from| from.0) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let name = if guard.is_open(&request) {
        None
    } else {
        match guard.guesses.name(guard.passwords.as_ref(), headers, from).await {
            Some(name) => Some(name),
            None => return ask_for_password(),
        }
    };
    request.extensions_mut().insert(Who { name, from });
    next.run(request).await
}

/// Reads the form of a request. A client that does not send it keeps no place.
pub async fn read_in_time(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    match timeout(LONGEST, to_bytes(body, LARGEST)).await {
        Ok(Ok(body)) => {
            if let Some(arriving) = head.extensions.get::<Arriving>() {
                arriving.arrived();
            }
            next.run(Request::from_parts(head, body.into())).await
        }
        Ok(Err(_)) => StatusCode::PAYLOAD_TOO_LARGE.into_response(),
        Err(_) => StatusCode::REQUEST_TIMEOUT.into_response(),
    }
}

fn ask_for_password() -> Response {
    let ask = [(header::WWW_AUTHENTICATE, r#"Basic realm="rowlock", charset="UTF-8""#)];
    (StatusCode::UNAUTHORIZED, ask, "a name and a password are required").into_response()
}

/// Returns whether the name is localhost, an IP address, or one of `names`. No other site can make
/// a browser send an IP address as the name of its host.
fn host_is_ours(headers: &HeaderMap, names: &[String]) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next().and_then(|host| host.to_str().ok()), hosts.next()) else { return false };
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    !host.contains('@')
        && (name.eq_ignore_ascii_case("localhost")
            || name.parse::<IpAddr>().is_ok()
            || names.iter().any(|ours| name.eq_ignore_ascii_case(ours)))
}

/// Returns whether the request comes from a page of this server, or from no page at all. Where a
/// proxy ends TLS, a page that came without TLS may be anyone's.
fn origin_is_ours(method: &Method, headers: &HeaderMap) -> bool {
    let changes = *method != Method::GET && *method != Method::HEAD;
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let is_tls = headers.get("x-forwarded-proto").is_some_and(|proto| proto == "https");
    let mut origins = headers.get_all(header::ORIGIN).iter();
    match (origins.next(), origins.next()) {
        (None, _) => !changes,
        (Some(origin), None) => {
            let origin = origin.to_str().unwrap_or_default();
            let plain = origin.strip_prefix("http://").filter(|_| !is_tls);
            let origin = plain.or_else(|| origin.strip_prefix("https://"));
            origin.is_some() && origin == host
        }
        _ => false,
    }
}

const HARDENED: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; \
         base-uri 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    // With `no-referrer`, a browser would send no origin with a form either.
    (header::REFERRER_POLICY, "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Adds what keeps browsers from loading, framing or storing more than this server means.
pub async fn harden(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    for (name, value) in HARDENED {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn only_names_of_this_server_are_hosts() {
        let names = ["locks.example.com".to_owned()];
        for ours in ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080", "10.1.2.3", "locks.example.com:443"] {
            assert!(host_is_ours(&headers(&[(header::HOST, ours)]), &names), "{ours}");
        }
        for other in ["evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example", "evil@localhost", ""] {
            assert!(!host_is_ours(&headers(&[(header::HOST, other)]), &names), "{other}");
        }
        assert!(!host_is_ours(&HeaderMap::new(), &names));
    }

    #[test]
    fn programs_may_use_any_name() {
        let (token, bearer) = (Some("a-token".to_owned()), Some("Bearer a-token"));
        let (local, guard) = (Guard::default(), Guard { metrics_token: token, ..Guard::default() });
        for (guard, path, sent, any_name, is_open) in [
            (&guard, HEALTH, None, true, true),
            (&guard, METRICS, bearer, true, true),
            (&guard, METRICS, Some("Bearer another"), true, false),
            (&guard, METRICS, Some("Basic a-token"), false, false),
            (&guard, METRICS, None, false, false),
            (&guard, "/", bearer, false, true),
            (&local, HEALTH, None, false, true),
            (&local, METRICS, bearer, false, true),
        ] {
            let mut request = Request::new(axum::body::Body::empty());
            *request.uri_mut() = path.parse().unwrap();
            request.headers_mut().extend(sent.map(|sent| (header::AUTHORIZATION, HeaderValue::from_static(sent))));
            let found = (guard.takes_any_name(&request), guard.is_open(&request));
            assert_eq!(found, (any_name, is_open), "{path} {sent:?}");
        }
    }

    #[test]
    fn a_change_comes_from_a_page_of_this_server() {
        let ours = |method, origin: Option<&str>| {
            let host = [(header::HOST, "localhost:8080")].into_iter();
            let pairs: Vec<_> = host.chain(origin.map(|origin| (header::ORIGIN, origin))).collect();
            origin_is_ours(&method, &headers(&pairs))
        };
        assert!(ours(Method::GET, None) && ours(Method::POST, Some("http://localhost:8080")));
        assert!(ours(Method::POST, Some("https://localhost:8080")), "behind a proxy that ends TLS");
        assert!(!ours(Method::POST, None));
        for other in ["null", "http://evil.example", "http://localhost", "http://localhost:8081", "localhost:8080"] {
            assert!(!ours(Method::POST, Some(other)) && !ours(Method::GET, Some(other)), "{other}");
        }
        let behind_tls = |origin| {
            let sent = [("x-forwarded-proto", "https"), ("host", "localhost"), ("origin", origin)];
            let sent = sent.map(|(name, value)| (HeaderName::from_static(name), value));
            origin_is_ours(&Method::POST, &headers(&sent))
        };
        assert!(behind_tls("https://localhost") && !behind_tls("http://localhost"), "anyone may have sent that page");
    }
}
