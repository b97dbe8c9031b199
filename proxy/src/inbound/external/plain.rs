//! Authorization servers that speak HTTP, as for nginx's `auth_request` and in GEP-1494: they get
//! the head of the request and the start of its body, and their status decides.

use bytes::{Bytes, BytesMut};
use diy_mesh_proto::authorization::has_certain_elements;
use diy_mesh_proto::field::{CALLER, PARTIAL_BODY, QUESTIONS, is_reserved};

use super::{Authorizer, Decision, Question, Subject, denies, reply_fields};
use crate::error::ExternalReply;
use crate::http::answer::Answer;

pub(super) fn question(
    authorizer: &Authorizer,
    subject: &Subject<'_>,
) -> Result<Question, &'static str> {
    let request = subject.request;
    if request.is_connect() {
        return Err("an authorization server cannot be asked about CONNECT");
    }
    // In HTTP/2, WebSockets begin with CONNECT.
    let method = if request.method == b"CONNECT" {
        b"GET"
    } else {
        request.method
    };
    let target = request.path_and_query();
    let slash: &[u8] = if target.starts_with(b"/") { b"" } else { b"/" };
    // The server may not see that an element leads out of the prefix, or which one ends it.
    let path = [slash, request.path()].concat();
    if !authorizer.path.is_empty() && !has_certain_elements(&path) {
        return Err("the authorization server could read another path than the application");
    }
    let mut head = BytesMut::new();
    for part in [
        method,
        b" ",
        authorizer.path.as_bytes(),
        slash,
        target,
        b" HTTP/1.1\r\n",
    ] {
        head.extend_from_slice(part);
    }
    put(&mut head, b"Host", request.authority().unwrap_or_default());
    let length = subject.body.start.len().to_string();
    put(&mut head, b"Content-Length", length.as_bytes());
    if let Some(is_partial) = subject.body.is_partial {
        put(&mut head, PARTIAL_BODY.as_bytes(), is_partial.as_bytes());
    }
    let number = subject.number()?.to_string();
    put(&mut head, QUESTIONS.as_bytes(), number.as_bytes());
    // X-Called-By is the identity of the pod that asks: the proxy of the server sets it.
    if let Some(caller) = subject.caller {
        put(&mut head, CALLER.as_bytes(), caller.as_str().as_bytes());
    }
    authorizer.visit_listed(subject, &["authorization"], |name, value| {
        let text = str::from_utf8(name).unwrap_or_default();
        if !is_reserved(text) {
            put(&mut head, name, value);
        }
    })?;
    head.extend_from_slice(b"\r\n");
    Ok(Question::Http {
        head: head.freeze(),
        method: Bytes::copy_from_slice(method),
        body: subject.body.start.clone(),
    })
}

fn put(head: &mut BytesMut, name: &[u8], value: &[u8]) {
    for part in [name, b": ", value, b"\r\n"] {
        head.extend_from_slice(part);
    }
}

pub(super) fn decision(authorizer: &Authorizer, answer: &Answer) -> Result<Decision, String> {
    let status = answer.status;
    match status.as_u16() {
        200..=299 => {
            let read = answer.fields.as_ref().map_err(Clone::clone)?;
            let fields = authorizer.response_fields.iter().map(|name| {
                let values = read.get_all(&**name).iter();
                (name.clone(), values.cloned().collect())
            });
            Ok(Decision::Allowed(fields.collect()))
        }
        ..=499 if denies(status) => {
            let fields = answer.fields.iter().flatten();
            let fields = fields.map(|(name, value)| (name.as_str(), value.as_bytes()));
            Ok(Decision::Denied(ExternalReply {
                status,
                headers: reply_fields(fields),
                body: answer.whole_body(),
            }))
        }
        _ => Err(format!("it responded with {status}")),
    }
}
