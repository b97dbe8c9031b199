//! The issuers of tokens. Pure.

use diy_mesh_jwt::Keys;
use diy_mesh_proto::authorization::check_issuer;
use diy_mesh_proto::mesh::v1 as proto;

use super::rejected;
use crate::authorization::spec::{ClaimHeader, Issuer};
use crate::routes::model::Rejection;
use crate::routes::parse::unsupported;

pub(super) fn issuer(spec: Issuer, field: &str) -> Result<proto::TokenIssuer, Rejection> {
    let at = format!("{field}.keys");
    let keys = match (&*spec.keys.kind, spec.keys.inline) {
        ("Inline", Some(keys)) => keys,
        (kind, _) => {
            let expected = "Inline, with its field and no other";
            return Err(unsupported(&format!("{at}.type"), kind, expected));
        }
    };
    Keys::parse(keys.as_bytes())
        .map_err(|error| unsupported(&format!("{at}.inline"), "", &error.to_string()))?;
    let headers = spec.headers.unwrap_or_default().into_iter();
    let fields = headers.map(|ClaimHeader { claim, name }| proto::ClaimField { claim, name });
    let issuer = proto::TokenIssuer {
        name: spec.issuer,
        audiences: spec.audiences,
        keys,
        fields: fields.collect(),
    };
    check_issuer(&issuer).map_err(|violation| rejected(field, "issuers.", &violation))?;
    Ok(issuer)
}
