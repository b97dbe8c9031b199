//! Authorization servers that speak gRPC: Envoy's ext_authz protocol, version 3. They get all that is
//! known of the request and of its client.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::time::SystemTime;

use diy_mesh_model::identity::Identity;
use diy_mesh_proto::envoy::auth::attribute_context::{HttpRequest, Peer, Request};
use diy_mesh_proto::envoy::auth::check_response::HttpResponse;
use diy_mesh_proto::envoy::auth::{
    Address, AttributeContext, CheckRequest, CheckResponse, DeniedHttpResponse, HeaderValueOption,
    OkHttpResponse, SocketAddress, Status, Timestamp,
};
use diy_mesh_proto::field::{PARTIAL_BODY, QUESTIONS};
use http::{HeaderValue, StatusCode, Version};
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};

use super::{Authorizer, Decision, Question, Subject, denies, reply_fields};
use crate::error::ExternalReply;
use crate::http::answer::Answer;
use crate::http::grpc;

const PATH: &str = "/envoy.service.auth.v3.Authorization/Check";

pub(super) fn question(
    authorizer: &Authorizer,
    subject: &Subject<'_>,
) -> Result<Question, &'static str> {
    let request = subject.request;
    let text = |bytes| str::from_utf8(bytes).map(str::to_owned);
    let text = |bytes| text(bytes).map_err(|_| "the target or the host is not UTF-8");
    let size = request
        .header("content-length")
        .and_then(|value| str::from_utf8(value).ok()?.parse().ok());
    let http = HttpRequest {
        id: request
            .header("x-request-id")
            .map(lossy)
            .unwrap_or_default(),
        method: text(request.method)?,
        headers: headers(authorizer, subject)?,
        path: text(request.path_and_query())?,
        host: text(request.authority().unwrap_or_default())?,
        scheme: "http".to_owned(),
        size: size.unwrap_or(-1),
        protocol: protocol(request.version).to_owned(),
        body: in_text(&subject.body.start),
        raw_body: subject.body.start.to_vec(),
    };
    let message = CheckRequest {
        attributes: Some(AttributeContext {
            source: Some(peer(subject.client, subject.caller)),
            destination: Some(peer(subject.server, subject.own)),
            request: Some(Request {
                time: Some(timestamp(subject.time)),
                http: Some(http),
            }),
        }),
    };
    let question = grpc::request(&authorizer.backend, PATH, &message);
    let mut question = question.ok_or("the authorization server has no valid name")?;
    let number = subject.number()?.into();
    question.headers_mut().insert(QUESTIONS, number);
    Ok(Question::Grpc(question))
}

fn headers(
    authorizer: &Authorizer,
    subject: &Subject<'_>,
) -> Result<HashMap<String, String>, &'static str> {
    let mut headers = HashMap::new();
    let mut add = |name: &[u8], value: &[u8]| {
        let name = lossy(name).to_ascii_lowercase();
        // RFC 9110, section 5.3, and RFC 9113, section 8.2.3.
        let separator = if name == "cookie" { "; " } else { "," };
        match headers.entry(name) {
            Entry::Vacant(entry) => {
                entry.insert(lossy(value));
            }
            Entry::Occupied(mut entry) => {
                *entry.get_mut() += &format!("{separator}{}", lossy(value))
            }
        }
    };
    if authorizer.request_fields.is_empty() {
        subject.visit(add);
    } else {
        authorizer.visit_listed(subject, &[], &mut add)?;
    }
    if let Some(is_partial) = subject.body.is_partial {
        headers.insert(PARTIAL_BODY.to_owned(), is_partial.to_owned());
    }
    Ok(headers)
}

/// A body as Envoy sends it by default. Its length stays, by which servers know that it is cut off.
fn in_text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text += chunk.valid();
        text.extend(chunk.invalid().iter().map(|_| '!'));
    }
    text
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_2 => "HTTP/2",
        Version::HTTP_10 => "HTTP/1.0",
        _ => "HTTP/1.1",
    }
}

fn peer(address: SocketAddr, identity: Option<&Identity>) -> Peer {
    Peer {
        address: Some(Address {
            socket_address: Some(SocketAddress {
                address: address.ip().to_canonical().to_string(),
                port_value: address.port().into(),
            }),
        }),
        principal: identity
            .map(|one| one.as_str().to_owned())
            .unwrap_or_default(),
    }
}

fn timestamp(time: SystemTime) -> Timestamp {
    let elapsed = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(elapsed.as_secs()).unwrap_or_default(),
        nanos: i32::try_from(elapsed.subsec_nanos()).unwrap_or_default(),
    }
}

pub(super) fn decision(authorizer: &Authorizer, answer: &Answer) -> Result<Decision, String> {
    let response = message(answer).or_else(|reason| denial_of_start(answer).ok_or(reason))?;
    let status = response.status.ok_or("its answer has no status")?;
    match (status.code, response.http_response) {
        (0, Some(HttpResponse::OkResponse(changes))) => allowed(authorizer, changes),
        (0, _) => allowed(authorizer, OkHttpResponse::default()),
        (_, Some(HttpResponse::DeniedResponse(denied))) => Ok(Decision::Denied(reply(denied))),
        _ => Ok(Decision::Denied(reply(DeniedHttpResponse {
            body: status.message,
            ..DeniedHttpResponse::default()
        }))),
    }
}

/// The message of a call that has succeeded.
fn message(answer: &Answer) -> Result<CheckResponse, String> {
    CheckResponse::decode(grpc::message(answer)?)
        .map_err(|_| "its answer is no CheckResponse".to_owned())
}

/// The denial in an incomplete message. `None`: the message may allow the request.
fn denial_of_start(answer: &Answer) -> Option<CheckResponse> {
    let is_grpc = answer.status == StatusCode::OK && answer.missing.is_some();
    let message = answer.body.get(grpc::PREFIX_BYTES..);
    let is_plain = answer.body.first() == Some(&0);
    let status = status_of(message.filter(|_| is_grpc && is_plain)?)?;
    (status.code != 0).then_some(CheckResponse {
        status: Some(Status {
            message: String::new(),
            ..status
        }),
        http_response: None,
    })
}

/// The status of a CheckResponse, which is field 1, from the start of the message.
fn status_of(mut message: &[u8]) -> Option<Status> {
    loop {
        let (number, wire) = decode_key(&mut message).ok()?;
        if wire != WireType::LengthDelimited {
            return None;
        }
        let length = usize::try_from(decode_varint(&mut message).ok()?).ok()?;
        let (field, rest) = message.split_at_checked(length)?;
        if number == 1 {
            return Status::decode(field).ok();
        }
        message = rest;
    }
}

fn allowed(authorizer: &Authorizer, changes: OkHttpResponse) -> Result<Decision, String> {
    let has_query = !changes.query_parameters_to_set.is_empty()
        || !changes.query_parameters_to_remove.is_empty();
    if has_query {
        return Err("it changes the query, which is not supported".to_owned());
    }
    // Those that are listed are removed in any case.
    let mut removed = changes.headers_to_remove.iter();
    if let Some(name) = removed.find(|name| authorizer.field(name).is_none()) {
        return Err(format!(
            "it removes {name:?}, which allowedResponseHeaders does not list"
        ));
    }
    let fields = authorizer
        .response_fields
        .iter()
        .map(|name| (name.clone(), vec![]));
    let mut fields: Vec<(_, Vec<HeaderValue>)> = fields.collect();
    for (key, value) in changes.headers.iter().filter_map(field) {
        let listed = fields
            .iter_mut()
            .find(|(name, _)| name.eq_ignore_ascii_case(key));
        let Some((_, values)) = listed else {
            continue;
        };
        let value = HeaderValue::from_bytes(value);
        values.push(value.map_err(|_| format!("its value of {key:?} is invalid"))?);
    }
    Ok(Decision::Allowed(fields))
}

fn reply(denied: DeniedHttpResponse) -> ExternalReply {
    let status = denied
        .status
        .and_then(|status| u16::try_from(status.code).ok());
    let status = status.and_then(|status| StatusCode::from_u16(status).ok());
    let status = status.filter(|status| denies(*status));
    ExternalReply {
        status: status.unwrap_or(StatusCode::FORBIDDEN),
        headers: reply_fields(denied.headers.iter().filter_map(field)),
        body: denied.body.into(),
    }
}

fn field(option: &HeaderValueOption) -> Option<(&str, &[u8])> {
    let header = option.header.as_ref()?;
    let value = match header.value.as_bytes() {
        b"" => &header.raw_value,
        value => value,
    };
    Some((&header.key, value))
}
