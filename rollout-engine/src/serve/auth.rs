//! Who may ask: the key, and no foreign web pages.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::app::App;
use super::error::ApiError;

/// Open to everyone: they tell that the server is there, and nothing else.
const OPEN: [&str; 3] = ["/health", "/liveness", "/ping"];

/// Lets a request through, or answers 401 or 403. Its body has not been read by then.
pub(super) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    // A browser adds this for a page that asks in its user's name. None has a reason to.
    if request.headers().contains_key(header::ORIGIN) {
        return ApiError::new(StatusCode::FORBIDDEN, "requests of web pages are not served").into_response();
    }
    if let Some(key) = &app.settings.api_key
        && !OPEN.contains(&request.uri().path())
    {
        let given = request.headers().get(header::AUTHORIZATION);
        let given = given
            .and_then(|value| bearer(value.as_bytes()))
            .unwrap_or_default();
        if !equal(key.as_bytes(), given) {
            let message = "the key is missing or wrong: send it as Authorization: Bearer KEY";
            return ApiError::new(StatusCode::UNAUTHORIZED, message)
                .code("invalid_api_key")
                .into_response();
        }
    }
    next.run(request).await
}

/// What follows the word `Bearer`, in any case.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Whether two keys are equal, in a time that depends on neither's content. Digests are compared, so that it does not
/// depend on the length of the right one either.
fn equal(key: &[u8], given: &[u8]) -> bool {
    Sha256::digest(key).ct_eq(&Sha256::digest(given)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        assert!(equal(b"secret", b"secret"));
        for wrong in [&b""[..], b"s", b"secre", b"secret ", b"Secret", b"secrets"] {
            assert!(!equal(b"secret", wrong), "{wrong:?}");
        }
        assert_eq!(bearer(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer(b"bearer  abc "), Some(&b"abc"[..]));
        assert_eq!(bearer(b"Basic abc"), None);
        assert_eq!(bearer(b"Bea"), None);
    }
}
