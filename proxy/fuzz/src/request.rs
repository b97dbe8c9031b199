//! One request in both versions of HTTP. They accept the same ones, choose the same routes, and
//! forward the same request after the same changes.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use diy_mesh_http2::Request;
use diy_mesh_proto::mesh::v1::{PathModifier, Redirect, UrlRewrite, path_modifier};
use diy_mesh_proto::pattern::Pattern;
use diy_mesh_proxy::error::RequestPart;
use diy_mesh_proxy::http::edits::{Edits, MeshField};
use diy_mesh_proxy::http::fields::FieldEdit;
use diy_mesh_proxy::http::view::{Fields, RequestView};
use diy_mesh_proxy::route::Service;
use diy_mesh_proxy::route::matching::{
    FieldMatch, Index, Match, MatchInput, PathMatch, ValueMatch,
};
use diy_mesh_proxy::route::url;
use diy_mesh_proxy::serve::http1::head::RequestHead;
use diy_mesh_proxy::serve::http2::head;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Method, Uri};

const CALLER: &str = "spiffe://cluster.local/ns/shop/sa/web";
/// Fields that frame a message, or belong to one connection: HTTP/2 lacks these fields.
const NOT_COMPARED: [&str; 10] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-connection",
    "te",
    "transfer-encoding",
    "upgrade",
];
/// Heads that are far from the limits of both versions.
const MAX_FIELDS: usize = 64;
const MAX_BYTES: usize = 16 * 1024;

/// How a request names its host.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// In `Host`, in both versions.
    Host,
    /// In `Host`, and in `:authority`.
    Authority,
    /// In a URL, and in `:authority`.
    Absolute,
}

/// A request: a line with the method, one with the host, one with the path, and fields.
pub fn request(bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let mut line = || lines.next().unwrap_or_default();
    let (method, host, path) = (line(), line(), line());
    let fields: Vec<_> = lines.filter_map(field).collect();
    if bytes.len() > MAX_BYTES || fields.len() > MAX_FIELDS || bytes.contains(&b'\r') {
        return;
    }
    for form in [Form::Host, Form::Authority, Form::Absolute] {
        let Some(parts) = http2(form, method, host, path, &fields) else {
            continue;
        };
        let http1 = http1(form, method, host, path, &fields);
        let accepted = (http1.is_some(), head::malformed(&parts).is_none());
        match http1 {
            Some(http1) if accepted.1 => compare(&http1, parts),
            // HTTP/1.1 requires the field and allows an empty one.
            Some(_) if host.is_empty() => {}
            _ => assert_eq!(accepted.0, accepted.1, "{form:?} {parts:?}"),
        }
    }
}

fn field(line: &[u8]) -> Option<(HeaderName, HeaderValue)> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let name = HeaderName::from_bytes(&line[..colon]).ok()?;
    let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?;
    (!NOT_COMPARED.contains(&name.as_str())).then_some((name, value))
}

type Pairs = [(HeaderName, HeaderValue)];

fn http1(
    form: Form,
    method: &[u8],
    host: &[u8],
    path: &[u8],
    fields: &Pairs,
) -> Option<RequestHead> {
    let url = [b"http://", host].concat();
    let before: &[u8] = if form == Form::Absolute { &url } else { b"" };
    let mut raw = [
        method,
        b" ",
        before,
        path,
        b" HTTP/1.1\r\nHost: ",
        host,
        b"\r\n",
    ]
    .concat();
    for (name, value) in fields {
        let name = name.as_str().as_bytes();
        raw.extend([name, b": ", value.as_bytes(), b"\r\n"].concat());
    }
    raw.extend_from_slice(b"\r\n");
    RequestHead::parse(Bytes::from(raw)).ok()
}

/// The request in HTTP/2, or `None` if HTTP/2 does not permit it, or gives it another meaning.
fn http2(form: Form, method: &[u8], host: &[u8], path: &[u8], fields: &Pairs) -> Option<Request> {
    let has_spaces = host.trim_ascii().len() < host.len();
    let is_tunnel = method.eq_ignore_ascii_case(b"CONNECT");
    let has_form = form != Form::Absolute || path.starts_with(b"/");
    // `Request::from` adds a slash.
    let lacks_slash = path.starts_with(b"?");
    if has_spaces || is_tunnel || !has_form || lacks_slash || path.contains(&b'#') {
        return None;
    }
    let mut uri = http::uri::Parts::default();
    uri.path_and_query = Some(PathAndQuery::try_from(path).ok()?);
    if form != Form::Host {
        uri.authority = Some(Authority::try_from(host).ok()?);
        uri.scheme = Some(Scheme::HTTP);
    }
    let mut parts = http::Request::new(()).into_parts().0;
    parts.method = Method::from_bytes(method).ok()?;
    parts.uri = Uri::from_parts(uri).ok()?;
    parts.headers = fields
        .iter()
        .cloned()
        .fold(Default::default(), |mut all, (name, value)| {
            http::HeaderMap::append(&mut all, name, value);
            all
        });
    if form == Form::Host {
        parts
            .headers
            .insert("host", HeaderValue::from_bytes(host).ok()?);
    }
    Some(Request::from(&parts))
}

fn compare(http1: &RequestHead, mut http2: Request) {
    same(&http1.view(), &head::view(&http2));
    let selected = select(&http1.view());
    assert_eq!(selected, select(&head::view(&http2)));
    let Ok(Some(selected)) = selected else { return };
    let selected = &matches()[selected];
    for location in redirects() {
        let service = Service {
            name: "shop/web",
            is_pod: false,
            address: ([10, 0, 0, 1], 80).into(),
        };
        let locations = [&http1.view(), &head::view(&http2)]
            .map(|view| url::location(&location, view, selected, &service));
        assert_eq!(locations[0], locations[1]);
    }
    let path = selected
        .prefix_len()
        .map(|_| path_modifier::Kind::Prefix("/z/".to_owned()));
    let rewrite = UrlRewrite {
        hostname: "new.example".to_owned(),
        path: modifier(path.unwrap_or(path_modifier::Kind::Full("/z".to_owned()))),
    };
    let caller = HeaderValue::from_static(CALLER);
    let own = [MeshField("X-Called-By", Some(&caller))];
    let changes = [
        FieldEdit::Set("x-a".to_owned(), "set".to_owned()),
        FieldEdit::Remove("x-b".to_owned()),
    ];
    let edits = |target| Edits {
        own: &own,
        policy: &[],
        trace: None,
        route: [&changes, &[], &[]],
        host: url::host(&rewrite),
        target,
    };
    let target = url::target(&rewrite, &http1.view(), selected);
    let mut out = BytesMut::new();
    http1.write(&mut out, edits(target.as_deref()));
    let http1 = RequestHead::parse(out.freeze()).expect("what was accepted once");
    let target = url::target(&rewrite, &head::view(&http2), selected);
    head::prepare(&mut http2, edits(target.as_deref())).expect("a short path");
    assert_eq!(head::malformed(&http2), None);
    same(&http1.view(), &head::view(&http2));
}

/// Both views are of one request.
fn same(http1: &RequestView<'_>, http2: &RequestView<'_>) {
    let line = |view: &RequestView<'_>| {
        let parts = [view.method, view.path()].map(<[u8]>::to_vec);
        (
            parts,
            view.query().map(<[u8]>::to_vec),
            view.authority().map(<[u8]>::to_vec),
        )
    };
    assert_eq!(line(http1), line(http2));
    assert_eq!(fields(http1.head), fields(http2.head));
}

/// The values of each field in order.
fn fields<F: Fields + ?Sized>(head: &F) -> BTreeMap<Vec<u8>, Vec<Vec<u8>>> {
    let mut fields: BTreeMap<_, Vec<Vec<u8>>> = BTreeMap::new();
    head.visit(&mut |name, value| {
        let name = name.to_ascii_lowercase();
        if !NOT_COMPARED.iter().any(|other| other.as_bytes() == name) {
            fields.entry(name).or_default().push(value.to_vec());
        }
    });
    fields
}

fn select(view: &RequestView<'_>) -> Result<Option<usize>, RequestPart> {
    let matches = matches();
    Index::new(&matches).select(&matches, &MatchInput::new(*view))
}

fn matches() -> [Match; 6] {
    let regex = |text| Pattern::parse(text).expect("valid");
    let field = |name: &str, value| FieldMatch {
        name: name.to_owned(),
        value,
    };
    [
        Match {
            path: Some(PathMatch::Exact("/a".to_owned())),
            method: Some("POST".to_owned()),
            ..Match::default()
        },
        Match {
            headers: vec![field("X-A", ValueMatch::Exact("1,2".to_owned()))],
            ..Match::default()
        },
        Match {
            headers: vec![field("host", ValueMatch::Exact("b.example".to_owned()))],
            query: vec![field("q", ValueMatch::Regex(regex("[0-9]+")))],
            ..Match::default()
        },
        Match {
            path: Some(PathMatch::prefix("/a/")),
            ..Match::default()
        },
        Match {
            path: Some(PathMatch::Regex(regex("/r.*"))),
            ..Match::default()
        },
        Match::default(),
    ]
}

fn modifier(kind: path_modifier::Kind) -> Option<PathModifier> {
    Some(PathModifier { kind: Some(kind) })
}

fn redirects() -> [Redirect; 2] {
    let redirect = Redirect {
        status: 302,
        ..Redirect::default()
    };
    let other = Redirect {
        scheme: "https".to_owned(),
        port: 8443,
        ..redirect.clone()
    };
    [redirect, other]
}
