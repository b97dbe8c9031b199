//! External authorization servers, of policies and of routes. Pure.

use diy_mesh_proto::authorization::MAX_ITEMS;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::route::is_label;
use proto::authorizer::Protocol;

use super::each;
use crate::kinds::authorization::server::Server;
use crate::kinds::authorization::spec::{BackendRef, ExternalAuth, GrpcAuth, HttpAuth};
use crate::kinds::route::parse::header_name;
use crate::object::fields::one_of;
use crate::object::rejection::{refuse, unsupported};
use crate::object::{Key, Rejection};

const FIELD: &str = "spec.externalAuth";
/// In milliseconds.
pub(crate) const DEFAULT_TIMEOUT: u64 = 1000;
/// The length of the name of a Service, and of a namespace.
const MAX_LABEL_BYTES: usize = 63;

/// The server of a policy in this namespace, with the settings that proxies ask it with.
pub(super) fn authorizer(
    spec: ExternalAuth,
    namespace: &str,
) -> Result<(proto::Authorizer, Server), Rejection> {
    let server = server(spec.backend_ref, namespace)?;
    let field = format!("{FIELD}.failureMode");
    let modes = [("Deny", false), ("Allow", true)];
    let fail_open = one_of(&field, spec.failure_mode.as_deref(), &modes)?;
    let authorizer = proto::Authorizer {
        backend: server.to_string(),
        timeout: spec.timeout.map_or(DEFAULT_TIMEOUT, |timeout| timeout.0),
        fail_open,
        max_body: spec.forward_body.unwrap_or_default().max_size,
        ..protocol(FIELD, &spec.protocol, spec.grpc, spec.http)?
    };
    Ok((authorizer, server))
}

fn server(spec: BackendRef, namespace: &str) -> Result<Server, Rejection> {
    let invalid = |name: &str, value: &str, expected: &str| {
        unsupported(&format!("{FIELD}.backendRef.{name}"), value, expected)
    };
    if !spec.group.is_empty() {
        return Err(invalid("group", &spec.group, "empty, the core group"));
    }
    if let Some(other) = spec.kind.filter(|kind| kind != "Service") {
        return Err(invalid("kind", &other, "Service"));
    }
    if !is_name(&spec.name) {
        return Err(invalid("name", &spec.name, "the name of a Service"));
    }
    let namespace = spec.namespace.as_deref().unwrap_or(namespace);
    if !is_name(namespace) {
        return Err(invalid("namespace", namespace, "the name of a namespace"));
    }
    let port = u16::try_from(spec.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| invalid("port", &spec.port.to_string(), "from 1 to 65535"))?;
    let service = Key::new(namespace, &spec.name);
    Ok(Server { service, port })
}

/// Whether a text is the name of a Service or of a namespace.
fn is_name(text: &str) -> bool {
    text.len() <= MAX_LABEL_BYTES && is_label(text)
}

/// The protocol and its settings, in the field `at`.
pub(crate) fn protocol(
    at: &str,
    text: &str,
    grpc: Option<GrpcAuth>,
    http: Option<HttpAuth>,
) -> Result<proto::Authorizer, Rejection> {
    match (text, grpc, http) {
        ("GRPC", grpc, None) => {
            let grpc = grpc.unwrap_or_default();
            let response = grpc.allowed_response_headers;
            Ok(proto::Authorizer {
                protocol: Protocol::Grpc.into(),
                request_fields: names(at, "grpc.allowedHeaders", grpc.allowed_headers)?,
                response_fields: names(at, "grpc.allowedResponseHeaders", response)?,
                ..proto::Authorizer::default()
            })
        }
        ("HTTP", None, http) => {
            let http = http.unwrap_or_default();
            let response = http.allowed_response_headers;
            Ok(proto::Authorizer {
                protocol: Protocol::Http.into(),
                path: http.path.unwrap_or_default(),
                request_fields: names(at, "http.allowedHeaders", http.allowed_headers)?,
                response_fields: names(at, "http.allowedResponseHeaders", response)?,
                ..proto::Authorizer::default()
            })
        }
        (other, ..) => {
            let expected = "GRPC or HTTP, without the field of the other one";
            refuse(at, "protocol", other, expected)
        }
    }
}

/// Names of headers, in lower case.
fn names(at: &str, field: &str, names: Option<Vec<String>>) -> Result<Vec<String>, Rejection> {
    let convert = |name: String, field: &str| header_name(field, &name);
    each(&format!("{at}.{field}"), names, MAX_ITEMS, convert)
}
