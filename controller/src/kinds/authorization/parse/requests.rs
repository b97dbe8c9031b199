//! The conditions on requests. Pure.

use diy_mesh_proto::mesh::v1 as proto;
use proto::authorized_field::Kind as FieldKind;
use proto::authorized_path::Kind as PathKind;

use super::{each, invalid};
use crate::kinds::authorization::spec::{
    ClaimMatch, GrpcMatch, HeaderMatch, PathMatch, RequestMatch,
};
use crate::object::Rejection;
use crate::object::fields::one_of;
use crate::object::rejection::{refuse, unsupported};

/// The maximum number of entries in each list of conditions.
const MAX_CONDITIONS: usize = 32;

pub(super) fn request(spec: RequestMatch, field: &str) -> Result<proto::RequestMatch, Rejection> {
    if spec.grpc.is_some() && spec.paths.is_some() {
        return Err(invalid(format!(
            "{field}: grpc and paths exclude each other"
        )));
    }
    let conditions = |name: &str| format!("{field}.{name}");
    let mut paths = each(&conditions("paths"), spec.paths, MAX_CONDITIONS, path)?;
    paths.extend(each(&conditions("grpc"), spec.grpc, MAX_CONDITIONS, grpc)?);
    let message = proto::RequestMatch {
        methods: each(&conditions("methods"), spec.methods, MAX_CONDITIONS, same)?,
        paths,
        hosts: each(&conditions("hosts"), spec.hosts, MAX_CONDITIONS, same)?,
        headers: each(&conditions("headers"), spec.headers, MAX_CONDITIONS, header)?,
        claims: each(&conditions("claims"), spec.claims, MAX_CONDITIONS, claim)?,
    };
    if message == proto::RequestMatch::default() {
        return Err(invalid(format!("{field}: expected a condition")));
    }
    Ok(message)
}

fn same(text: String, _: &str) -> Result<String, Rejection> {
    Ok(text)
}

fn path(spec: PathMatch, field: &str) -> Result<proto::AuthorizedPath, Rejection> {
    type OfText = fn(String) -> PathKind;
    let kinds: [(&str, OfText); 4] = [
        ("Exact", PathKind::Exact),
        ("PathPrefix", PathKind::Prefix),
        ("Suffix", PathKind::Suffix),
        ("Template", PathKind::Template),
    ];
    let kind = one_of(&format!("{field}.type"), Some(&spec.kind), &kinds)?;
    let kind = Some(kind(spec.value));
    Ok(proto::AuthorizedPath { kind })
}

fn grpc(spec: GrpcMatch, field: &str) -> Result<proto::AuthorizedPath, Rejection> {
    let is_valid = |name: &str| {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"._".contains(&byte);
        !name.is_empty() && name.bytes().all(is_valid)
    };
    let GrpcMatch { service, method } = spec;
    let path = match method {
        Some(method) if is_valid(&service) && is_valid(&method) => {
            PathKind::Exact(format!("/{service}/{method}"))
        }
        None if is_valid(&service) => PathKind::Prefix(format!("/{service}")),
        method => {
            let shown = format!("{service}/{}", method.unwrap_or_default());
            let expected = "a gRPC service with its package, and a method";
            return Err(unsupported(field, &shown, expected));
        }
    };
    Ok(proto::AuthorizedPath { kind: Some(path) })
}

fn header(spec: HeaderMatch, field: &str) -> Result<proto::AuthorizedField, Rejection> {
    condition(
        spec.name.to_ascii_lowercase(),
        &spec.kind,
        spec.value,
        field,
    )
}

fn claim(spec: ClaimMatch, field: &str) -> Result<proto::AuthorizedField, Rejection> {
    condition(spec.claim, &spec.kind, spec.value, field)
}

fn condition(
    name: String,
    kind: &str,
    value: Option<String>,
    field: &str,
) -> Result<proto::AuthorizedField, Rejection> {
    let value = value.filter(|value| !value.is_empty());
    let kind = match (kind, value) {
        ("Exact", Some(value)) => FieldKind::Exact(value),
        ("Prefix", Some(value)) => FieldKind::Prefix(value),
        ("Suffix", Some(value)) => FieldKind::Suffix(value),
        ("Present", None) => FieldKind::Present(proto::Present {}),
        (other, _) => {
            let expected = "Exact, Prefix or Suffix with value, or Present without";
            return refuse(field, "type", other, expected);
        }
    };
    Ok(proto::AuthorizedField {
        name,
        kind: Some(kind),
    })
}
