//! Values of single fields from untrusted peers: deadlines, session tokens and origins.

use diy_mesh_proto::mesh::v1::{Cors, SessionPersistence};
use diy_mesh_proxy::error::Limit;
use diy_mesh_proxy::http::fields::FieldEdit;
use diy_mesh_proxy::http::view::RequestView;
use diy_mesh_proxy::limits::deadline::{Deadline, parse_grpc_timeout};
use diy_mesh_proxy::route::cors;
use diy_mesh_proxy::route::session::{Session, is_token, tag};
use http::{HeaderValue, Request, Version};

const NOW: u64 = 1_795_341_600;

/// The value of a field.
pub fn values(bytes: &[u8]) {
    grpc_timeout(bytes);
    if let Ok(value) = HeaderValue::from_bytes(bytes.trim_ascii()) {
        session(&value);
        origin(&value);
    }
}

/// The timeout for the next hop never exceeds the timeout that the caller has sent.
fn grpc_timeout(bytes: &[u8]) {
    let Some(timeout) = parse_grpc_timeout(bytes) else {
        return;
    };
    let deadline = Deadline::after(Some(timeout), Limit::Caller);
    if let Some(left) = deadline.grpc_timeout(bytes) {
        let left = parse_grpc_timeout(left.as_bytes()).expect("a valid value");
        assert!(left <= timeout, "{left:?} of {timeout:?}");
    }
}

fn head(name: &'static str, value: &HeaderValue) -> diy_mesh_http2::Request {
    let request = Request::get("/").header(name, value).body(());
    diy_mesh_http2::Request::from(&request.expect("a request").into_parts().0)
}

fn view(head: &diy_mesh_http2::Request) -> RequestView<'_> {
    RequestView {
        method: b"GET",
        target: b"/",
        head,
        version: Version::HTTP_11,
        upgrade: false,
    }
}

/// A token names what the proxy has written into it, and dumps recognize it.
fn session(value: &HeaderValue) {
    let persistence = SessionPersistence {
        header: "x-session".to_owned(),
        absolute_timeout: 3_600_000,
        idle_timeout: 60_000,
        ..SessionPersistence::default()
    };
    let session = |value| Session::new(&persistence, &view(&head("x-session", value)), None, NOW);
    let first = session(value);
    assert_eq!(first.backend().is_some(), first.endpoint().is_some());
    assert!(first.backend().is_none() || is_token(value.as_bytes()));
    let backend = first.backend().unwrap_or(tag(&["shop/web:80"]));
    let endpoint = first.endpoint().unwrap_or(tag(&["shop/web-1"]));
    let Some(FieldEdit::Set(_, token)) = first.edit(backend, endpoint, NOW) else {
        panic!("a session with an idle timeout gets a token with each response");
    };
    assert!(is_token(token.as_bytes()));
    let next = session(&HeaderValue::try_from(token).expect("a value"));
    let is_over = first.backend().is_some() && next.backend().is_none();
    assert!(!is_over, "the session has begun before its end");
    assert_eq!(next.backend(), Some(backend));
    assert_eq!(next.endpoint(), Some(endpoint));
}

/// Only the allowed origins get a permission, with their own name.
fn origin(value: &HeaderValue) {
    let origins = ["https://*.example", "http://a:81"];
    let cors = Cors {
        allow_origins: origins.map(str::to_owned).into(),
        allow_credentials: true,
        ..Cors::default()
    };
    let fields = cors::apply(&cors, &view(&head("origin", value)));
    let fields = fields.ok().into_iter().flatten();
    for field in fields {
        let FieldEdit::Set(name, allowed) = field else {
            continue;
        };
        if name.eq_ignore_ascii_case("access-control-allow-origin") {
            assert_eq!(allowed.as_bytes(), value.as_bytes());
            let allowed = allowed.to_ascii_lowercase();
            let (scheme, authority) = allowed.split_once("://").expect("a scheme");
            let host = authority
                .rsplit_once(':')
                .map_or(authority, |(host, _)| host);
            let is_allowed = match scheme {
                "https" => host.ends_with(".example") && !host.contains(['/', '@', '?', '#']),
                _ => (scheme, host) == ("http", "a"),
            };
            assert!(is_allowed, "{allowed}");
        }
    }
}
