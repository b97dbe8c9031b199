//! Tests of HTTP/2 through the proxy over sockets: clients, a worker without listeners, and apps.

mod calls;
mod deadlines;
mod endpoints;
mod forgery;
mod hostile;
mod large_sections;
mod metrics;
mod passing;
mod raw;
mod resets;
mod silence;
mod slow_readers;
mod small_frames;

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use diy_mesh_testkit::net::{closed_address, connected, listen};
use diy_mesh_testkit::output::Output;
use diy_mesh_testkit::wait::{on_worker, until};
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::context::flow::Flow;
use crate::context::worker::{Worker, WorkerContext};
use crate::discovery::{Discovery, Target, TargetKind};
use crate::endpoint::EndpointInfo;
use crate::inbound::policy::Caller;
use crate::observe::dump::{DumpConfig, Dumps, Format, Mode};
use crate::observe::metrics::Metrics;
use crate::protocol::Protocol;
use crate::route::matching::Match;
use crate::route::{RetryPolicy, Routes, Rule};
use crate::secure::io::Io;
use crate::secure::tls::tests::freeze;
use crate::upstream::balance::Backend;
use diy_mesh_model::exchange::Direction;

/// A worker and its metrics and dumps.
struct Mesh {
    worker: Rc<Worker>,
    metrics: Arc<Metrics>,
    drain: CancellationToken,
    dumped: Output,
}

impl Mesh {
    fn new() -> Self {
        Self::with(Discovery::off())
    }

    fn with(discovery: Discovery) -> Self {
        Self::with_arguments(discovery, "")
    }

    fn with_arguments(discovery: Discovery, arguments: &str) -> Self {
        let (context, dumped) = (WorkerContext::for_a_test(arguments), Output::default());
        let (metrics, drain) = (context.metrics.clone(), context.drain.clone());
        let dump_config = DumpConfig {
            mode: Mode::Full,
            format: Format::Text,
            out: Box::new(dumped.clone()),
        };
        let dumps = Dumps::start(dump_config, metrics.clone()).unwrap();
        Self {
            worker: Worker::new(WorkerContext {
                dumps,
                discovery,
                ..context
            }),
            metrics,
            drain,
            dumped,
        }
    }

    /// A worker with a Service that has these endpoints.
    async fn with_service(endpoints: &[SocketAddr]) -> (Self, Rc<Backend>) {
        Self::with_routes(endpoints, None).await
    }

    /// Like [`Mesh::with_service`], with routes.
    async fn with_routes(endpoints: &[SocketAddr], routes: Option<Routes>) -> (Self, Rc<Backend>) {
        let (discovery, mut questions) = Discovery::by_hand();
        let mesh = Self::with(discovery);
        let mut endpoints: Vec<_> = endpoints
            .iter()
            .map(|address| Arc::new(EndpointInfo::bare(*address)))
            .collect();
        endpoints.sort_by_key(|endpoint| endpoint.address);
        let target = Target {
            kind: TargetKind::Service,
            namespace: "shop".into(),
            name: "cart".into(),
            app_protocol: Some(Protocol::Http2),
            endpoints,
            routes: routes.map(Arc::new),
            ..Target::default()
        };
        let address = SocketAddr::from(([10, 96, 0, 7], 80));
        let (destination, ()) =
            tokio::join!(mesh.worker.destinations.get_or_watch(address), async {
                let (_, answer) = questions.next().await;
                // No updates follow. The target stays in effect.
                drop(answer(Arc::new(target)));
            });
        (mesh, destination)
    }

    /// An outbound connection through the proxy.
    async fn dial(&self, destination: &Rc<Backend>) -> TcpStream {
        self.carry(Direction::Outbound, destination, Caller::App)
            .await
    }

    /// An inbound HTTP/2 connection of an unauthenticated peer through the proxy to the app at
    /// `address`.
    async fn inbound_client(&self, address: SocketAddr) -> SendRequest<Bytes> {
        connect(
            self.carry(
                Direction::Inbound,
                &Backend::alone(address),
                Caller::Unauthenticated,
            )
            .await,
        )
        .await
    }

    async fn carry(
        &self,
        direction: Direction,
        destination: &Rc<Backend>,
        caller: Caller,
    ) -> TcpStream {
        let (client, stream) = connected().await;
        let flow = self.flow(direction, destination, caller, &stream);
        tokio::task::spawn_local(super::serve(Io::new(stream), flow));
        client
    }

    /// The flow of a connection that the proxy has accepted.
    fn flow(
        &self,
        direction: Direction,
        destination: &Rc<Backend>,
        caller: Caller,
        stream: &TcpStream,
    ) -> Rc<Flow> {
        Rc::new(Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: self.worker.slot(),
            worker: self.worker.clone(),
            direction,
            peer: stream.peer_addr().unwrap(),
            original: destination.address().unwrap(),
            destination: destination.clone(),
            caller,
        })
    }

    /// An outbound HTTP/2 connection through the proxy.
    async fn client(&self, destination: &Rc<Backend>) -> SendRequest<Bytes> {
        connect(self.dial(destination).await).await
    }

    /// Like [`Mesh::client`], to one address.
    async fn client_of(&self, address: SocketAddr) -> SendRequest<Bytes> {
        self.client(&Backend::alone(address)).await
    }

    /// The number of requests with all of these labels.
    fn requests(&self, labels: &[&str]) -> u64 {
        let metric = "diy_mesh_proxy_requests_total";
        diy_mesh_testkit::metrics::sum(&self.metrics.render(), metric, labels)
    }

    fn metric(&self, name: &str) -> u64 {
        let name = format!("diy_mesh_proxy_{name}");
        diy_mesh_testkit::metrics::value(&self.metrics.render(), &name)
    }
}

async fn connect(stream: TcpStream) -> SendRequest<Bytes> {
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::task::spawn_local(async move {
        // The streams return the errors of the connection.
        let _ = connection.await;
    });
    sender
}

/// Starts an app that passes each stream to `handle`. Returns its address.
async fn app<F: Future<Output = ()> + 'static>(
    handle: impl Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Clone + 'static,
) -> SocketAddr {
    app_with(h2::server::Builder::new(), handle).await
}

async fn app_with<F: Future<Output = ()> + 'static>(
    settings: h2::server::Builder,
    handle: impl Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Clone + 'static,
) -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::task::spawn_local(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (handle, settings) = (handle.clone(), settings.clone());
            tokio::task::spawn_local(async move {
                let Ok(mut connection) = settings.handshake(stream).await else {
                    return;
                };
                while let Some(Ok((request, respond))) = connection.accept().await {
                    tokio::task::spawn_local(handle(request, respond));
                }
            });
        }
    });
    address
}

/// Starts an app that responds to each request with its name.
async fn named_app(name: &'static str) -> SocketAddr {
    app(move |_, mut respond| async move {
        let mut stream = respond.send_response(Response::new(()), false).unwrap();
        stream
            .send_data(Bytes::from_static(name.as_bytes()), true)
            .unwrap();
    })
    .await
}

/// Starts an app that accepts streams, reads no bodies and never responds.
async fn stalled_app() -> SocketAddr {
    app(|request, respond| async move {
        let _held = (request, respond);
        std::future::pending::<()>().await;
    })
    .await
}

/// Responds with the body and the trailers of the request.
async fn echo(request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let (data, trailers) = read_body(&mut request.into_body()).await.unwrap();
    let mut stream = respond.send_response(Response::new(()), false).unwrap();
    stream.send_data(data, trailers.is_none()).unwrap();
    if let Some(trailers) = trailers {
        stream.send_trailers(trailers).unwrap();
    }
}

fn get(path: &str) -> Request<()> {
    Request::get(format!("http://app{path}")).body(()).unwrap()
}

fn grpc(path: &str) -> Request<()> {
    let request = Request::post(format!("http://app{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    request.body(()).unwrap()
}

/// Sends a request without a body, and reads the complete response.
async fn call(
    client: &mut SendRequest<Bytes>,
    request: Request<()>,
) -> Result<(Response<Bytes>, Option<HeaderMap>), h2::Error> {
    poll_fn(|cx| client.poll_ready(cx)).await?;
    let (response, _) = client.send_request(request, true)?;
    read(response.await?).await
}

/// Sends a request and asserts that the response has status 200.
async fn assert_ok(client: &mut SendRequest<Bytes>) {
    let (response, _) = call(client, get("/")).await.unwrap();
    assert_eq!(response.status(), 200);
}

/// Asserts that the proxy has replied with this status and `x-mesh-error`.
fn assert_local_reply(response: &Response<Bytes>, status: u16, code: &str) {
    assert_eq!(response.status(), status);
    assert_eq!(response.headers()["x-mesh-error"], code);
}

/// Sends a request with a body, and reads the complete response.
async fn call_with(
    client: &mut SendRequest<Bytes>,
    request: Request<()>,
    body: &'static [u8],
) -> Result<(Response<Bytes>, Option<HeaderMap>), h2::Error> {
    poll_fn(|cx| client.poll_ready(cx)).await?;
    let (response, mut stream) = client.send_request(request, false)?;
    stream.send_data(Bytes::from_static(body), true)?;
    read(response.await?).await
}

async fn read(
    response: Response<RecvStream>,
) -> Result<(Response<Bytes>, Option<HeaderMap>), h2::Error> {
    let (parts, mut body) = response.into_parts();
    let (data, trailers) = read_body(&mut body).await?;
    Ok((Response::from_parts(parts, data), trailers))
}

async fn read_body(body: &mut RecvStream) -> Result<(Bytes, Option<HeaderMap>), h2::Error> {
    let mut data = Vec::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        data.extend_from_slice(&chunk);
    }
    Ok((data.into(), body.trailers().await?))
}

/// Waits until the other side resets the stream.
async fn reset_of(stream: &mut SendStream<Bytes>) -> Reason {
    poll_fn(|cx| stream.poll_reset(cx)).await.unwrap()
}

fn fields(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    pairs
        .iter()
        .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
        .collect()
}
