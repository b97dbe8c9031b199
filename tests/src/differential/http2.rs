//! HTTP/2 with prior knowledge: random requests and responses on concurrent streams, and their
//! transcripts.

use std::fmt::Write;
use std::future::poll_fn;

use bytes::Bytes;
use fastrand::Rng;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};

use super::{KEY, Omitted, bytes, rng, text, write_fields};

/// A request, and the response to it.
pub struct Exchange {
    pub request: Request<()>,
    pub request_body: Body,
    /// The status and the fields of interim responses.
    pub interim: Vec<Response<()>>,
    pub response: Response<()>,
    pub response_body: Body,
}

/// The frames after the head: data, then trailers.
#[derive(Default)]
pub struct Body {
    data: Vec<Vec<u8>>,
    trailers: Option<HeaderMap>,
}

const TOKEN: &[u8] = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz";

/// The exchanges of a connection, one on each stream.
pub fn exchanges(seed: u64, number: u64) -> Vec<Exchange> {
    let mut rng = rng(seed, number, 2);
    let count = rng.usize(1..6);
    (0..count)
        .map(|index| exchange(&mut rng, number, index))
        .collect()
}

fn exchange(rng: &mut Rng, number: u64, index: usize) -> Exchange {
    let methods = ["GET", "HEAD", "POST", "POST", "PUT", "DELETE", "X-y'z~!"];
    let method = *rng.choice(methods).as_ref().expect("there is one");
    let path: String = (0..rng.usize(..30))
        .map(|_| {
            *rng.choice(b"/.-_~!$&'()*+,;=:@09afAF?")
                .expect("there is one") as char
        })
        .collect();
    let mut request = Request::builder()
        .method(Method::from_bytes(method.as_bytes()).expect("the method is valid"))
        .uri(format!("http://differential.test/{path}"))
        .body(())
        .expect("the request is valid");
    *request.headers_mut() = headers(rng);
    let key = format!("{number}.{index}");
    let key = HeaderValue::try_from(key).expect("the key is valid");
    request.headers_mut().insert(KEY, key);
    let request_body = body(
        rng,
        request.headers_mut(),
        matches!(method, "GET" | "HEAD" | "DELETE"),
    );
    let status = *rng
        .choice([200, 200, 201, 204, 206, 299, 304, 404, 418, 500])
        .as_ref()
        .expect("there is one");
    let mut response = response_with(rng, status);
    let is_empty = method == "HEAD" || matches!(status, 204 | 304);
    let response_body = body(rng, response.headers_mut(), is_empty);
    let interim = if rng.u8(..6) > 0 { 0 } else { rng.usize(1..3) };
    Exchange {
        request,
        request_body,
        interim: (0..interim).map(|_| response_with(rng, 103)).collect(),
        response,
        response_body,
    }
}

fn response_with(rng: &mut Rng, status: u16) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::from_u16(status).expect("the status is valid");
    *response.headers_mut() = headers(rng);
    response
}

/// Random data and trailers. If the whole length is known, the head may have it.
fn body(rng: &mut Rng, head: &mut HeaderMap, is_empty: bool) -> Body {
    if is_empty {
        return Body::default();
    }
    let data: Vec<Vec<u8>> = (0..rng.usize(..4)).map(|_| bytes(rng)).collect();
    if rng.bool() {
        let length = data.iter().map(Vec::len).sum::<usize>();
        head.insert("content-length", HeaderValue::from(length));
    }
    let trailers = (rng.u8(..3) == 0).then(|| headers(rng));
    Body { data, trailers }
}

fn headers(rng: &mut Rng) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for _ in 0..rng.usize(..8) {
        let name: Vec<u8> = (0..rng.usize(2..15))
            .map(|_| *rng.choice(TOKEN).expect("there is one"))
            .collect();
        let known = [
            &b"accept"[..],
            b"cookie",
            b"user-agent",
            b"authorization",
            b"grpc-message",
            &name,
            &name,
        ];
        let name = HeaderName::from_bytes(rng.choice(known).expect("there is one"))
            .expect("the name is valid");
        if ["te", "via", "host"].contains(&name.as_str()) {
            continue;
        }
        for _ in 0..rng.usize(1..3) {
            let value: Vec<u8> = (0..rng.usize(..30))
                .map(|_| {
                    if rng.u8(..15) == 0 {
                        rng.u8(0x80..)
                    } else {
                        rng.u8(0x21..0x7f)
                    }
                })
                .collect();
            let mut value = HeaderValue::from_bytes(&value).expect("the value is valid");
            value.set_sensitive(rng.u8(..10) == 0);
            headers.append(name.clone(), value);
        }
    }
    if rng.u8(..10) == 0 {
        headers.insert("te", HeaderValue::from_static("trailers"));
    }
    headers
}

impl Body {
    pub fn is_empty(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    /// Sends the frames, as the windows of the receiver permit.
    pub async fn send(self, stream: &mut SendStream<Bytes>) -> Result<(), h2::Error> {
        let last = self.data.len();
        let ends = self.trailers.is_none();
        for (index, data) in self.data.into_iter().enumerate() {
            let mut data = Bytes::from(data);
            while !data.is_empty() {
                stream.reserve_capacity(data.len());
                let capacity = poll_fn(|cx| stream.poll_capacity(cx)).await;
                let capacity = capacity.ok_or(h2::Reason::CANCEL)??;
                let piece = data.split_to(capacity.min(data.len()));
                stream.send_data(piece, ends && index + 1 == last && data.is_empty())?;
            }
            if ends && index + 1 == last {
                // An empty last one was not sent yet.
                let _ = stream.send_data(Bytes::new(), true);
            }
        }
        match self.trailers {
            Some(trailers) => stream.send_trailers(trailers),
            None => Ok(()),
        }
    }
}

/// The transcript of a request.
pub async fn request(request: Request<RecvStream>, omitted: &Omitted) -> Result<String, h2::Error> {
    let (head, body) = request.into_parts();
    let start = format!("{} {}\n", head.method, head.uri);
    message(start, ("requests", &head.headers), body, omitted).await
}

/// The transcript of a response.
pub async fn response(
    response: Response<RecvStream>,
    omitted: &Omitted,
) -> Result<String, h2::Error> {
    let (head, body) = response.into_parts();
    message(
        format!("{}\n", head.status),
        ("responses", &head.headers),
        body,
        omitted,
    )
    .await
}

/// The transcript of an interim response.
pub fn interim(response: &Response<()>, omitted: &Omitted) -> String {
    let mut transcript = format!("{}\n", response.status());
    write_headers(
        &mut transcript,
        response.headers(),
        &omitted.of("responses"),
    );
    transcript
}

async fn message(
    mut transcript: String,
    (part, headers): (&str, &HeaderMap),
    mut body: RecvStream,
    omitted: &Omitted,
) -> Result<String, h2::Error> {
    write_headers(&mut transcript, headers, &omitted.of(part));
    let mut all = Vec::new();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        all.extend(data);
    }
    transcript += &format!("  body {}\n", text(&all));
    if let Some(trailers) = body.trailers().await? {
        transcript += "  trailers\n";
        write_headers(&mut transcript, &trailers, &omitted.of("trailers"));
    }
    Ok(transcript)
}

fn write_headers(transcript: &mut String, headers: &HeaderMap, omitted: &[String]) {
    let fields = headers
        .iter()
        .map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes()));
    write_fields(transcript, fields, omitted);
    for (name, _) in headers.iter().filter(|(_, value)| value.is_sensitive()) {
        writeln!(transcript, "  sensitive {name}").expect("a String has room");
    }
}
