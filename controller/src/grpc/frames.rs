//! Discover over HTTP/2 with messages that are encoded once for all of their streams.
//!
//! tonic encodes each message for each stream, into a buffer that keeps the size of the stream's
//! largest message. This service sends shared bytes, and leaves all other RPCs to tonic.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use diy_mesh_proto::mesh::v1 as proto;
use futures::future::BoxFuture;
use futures::{Stream, StreamExt, stream};
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use proto::service_mesh_service_server::{SERVICE_NAME, ServiceMeshServiceServer};
use tonic::body::Body;
use tonic::codec::BufferSettings;
use tonic::codegen::Service;
use tonic::metadata::MetadataMap;
use tonic::server::NamedService;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::{MAX_MESSAGE_BYTES, Mesh};

const DISCOVER_PATH: &str = "/mesh.v1.ServiceMeshService/Discover";
/// The flag for compression and the length of a message.
const PREFIX_BYTES: usize = 5;
/// Requests on a Discover stream are short. The buffer grows for longer ones.
const REQUEST_BUFFER_BYTES: usize = 256;

/// The service of `mesh.proto`.
#[derive(Clone)]
pub(super) struct MeshServer {
    mesh: Arc<Mesh>,
    others: ServiceMeshServiceServer<Mesh>,
}

impl MeshServer {
    pub(super) fn new(mesh: Mesh) -> MeshServer {
        let mesh = Arc::new(mesh);
        let others = ServiceMeshServiceServer::from_arc(mesh.clone());
        MeshServer {
            mesh,
            others: others.max_decoding_message_size(MAX_MESSAGE_BYTES),
        }
    }
}

impl NamedService for MeshServer {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<hyper::Request<Body>> for MeshServer {
    type Response = hyper::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: hyper::Request<Body>) -> Self::Future {
        if request.uri().path() != DISCOVER_PATH {
            return self.others.call(request);
        }
        let mesh = self.mesh.clone();
        Box::pin(async move {
            let response = mesh.serve_discover(decode(request)).await;
            Ok(response.unwrap_or_else(Status::into_http))
        })
    }
}

fn decode(request: hyper::Request<Body>) -> Request<Streaming<proto::DiscoverRequest>> {
    let (parts, body) = request.into_parts();
    let buffer = BufferSettings::new(REQUEST_BUFFER_BYTES, REQUEST_BUFFER_BYTES);
    let decoder = RequestCodec::raw_decoder(buffer);
    let requests = Streaming::new_request(decoder, body, None, Some(MAX_MESSAGE_BYTES));
    let metadata = MetadataMap::from_headers(parts.headers);
    Request::from_parts(metadata, parts.extensions, requests)
}

type RequestCodec = ProstCodec<proto::DiscoverResponse, proto::DiscoverRequest>;

/// A message as it is on the wire.
pub(super) fn encode(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).expect("a message is shorter than 4 GiB"));
    message
        .encode(&mut bytes)
        .expect("the buffer has the length of the message");
    bytes.freeze()
}

/// A message with a further field, whose parts many messages share.
pub(super) fn spliced(message: &impl Message, field: u32, parts: &[Bytes]) -> Vec<Bytes> {
    let length: usize = parts.iter().map(Bytes::len).sum();
    let total = message.encoded_len() + field_len(field, length);
    let mut head = BytesMut::with_capacity(PREFIX_BYTES + total - length);
    head.put_u8(0);
    head.put_u32(u32::try_from(total).expect("a message is shorter than 4 GiB"));
    message
        .encode(&mut head)
        .expect("the buffer has the length of the message");
    encode_key(field, WireType::LengthDelimited, &mut head);
    encode_varint(length as u64, &mut head);
    let parts = parts.iter().filter(|part| !part.is_empty()).cloned();
    std::iter::once(head.freeze()).chain(parts).collect()
}

/// The length of a field with content of this length.
fn field_len(field: u32, length: usize) -> usize {
    key_len(field) + encoded_len_varint(length as u64) + length
}

/// A field of a message.
pub(super) fn field(number: u32, content: &impl Message) -> Bytes {
    let mut bytes = BytesMut::with_capacity(field_len(number, content.encoded_len()));
    prost::encoding::message::encode(number, content, &mut bytes);
    bytes.freeze()
}

/// A response with these messages. An error ends it.
pub(super) fn response(
    messages: impl Stream<Item = Result<Bytes, Status>> + Send + 'static,
) -> hyper::Response<Body> {
    let end = stream::once(async { Err(Status::new(tonic::Code::Ok, "")) });
    let frames = messages.chain(end).map(|message| {
        Ok::<_, Infallible>(match message {
            Ok(bytes) => Frame::data(bytes),
            Err(status) => Frame::trailers(trailers(&status)),
        })
    });
    let mut response = hyper::Response::new(Body::new(StreamBody::new(frames)));
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(CONTENT_TYPE, grpc);
    response
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if let Err(invalid) = status.add_header(&mut trailers) {
        tracing::error!("cannot encode a status: {invalid}");
    }
    trailers
}
