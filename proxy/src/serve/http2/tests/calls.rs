//! Tests with a tonic client and server, through protocol detection.

use diy_mesh_proto::echo::v1::echo_service_client::EchoServiceClient;
use diy_mesh_proto::echo::v1::echo_service_server::{EchoService, EchoServiceServer};
use diy_mesh_proto::echo::v1::{EchoRequest, EchoResponse};
use hyper_util::rt::TokioIo;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::{Endpoint, Server, Uri};
use tonic::{Code, Status, Streaming};

use super::*;
use crate::inbound::policy::Caller;
use crate::path::connection::carry;

struct Echo;

type Responses = std::pin::Pin<Box<dyn Stream<Item = Result<EchoResponse, Status>> + Send>>;

#[tonic::async_trait]
impl EchoService for Echo {
    async fn echo(
        &self,
        request: tonic::Request<EchoRequest>,
    ) -> Result<tonic::Response<EchoResponse>, Status> {
        let message = request.into_inner().message;
        if message == "?" {
            return Err(Status::not_found("no echo"));
        }
        Ok(tonic::Response::new(response(message)))
    }

    type EchoStreamStream = Responses;

    async fn echo_stream(
        &self,
        request: tonic::Request<Streaming<EchoRequest>>,
    ) -> Result<tonic::Response<Responses>, Status> {
        let responses = request
            .into_inner()
            .map(|request| Ok(response(request?.message)));
        Ok(tonic::Response::new(Box::pin(responses)))
    }
}

fn response(message: String) -> EchoResponse {
    EchoResponse {
        message,
        hostname: "h".into(),
        version: "1.0".into(),
    }
}

async fn client_through(
    mesh: &Mesh,
    address: SocketAddr,
) -> EchoServiceClient<tonic::transport::Channel> {
    let (listener, near) = listen().await;
    let worker = mesh.worker.clone();
    tokio::task::spawn_local(async move {
        let (stream, peer) = listener.accept().await.unwrap();
        let flow = Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: worker.slot(),
            worker,
            direction: Direction::Outbound,
            peer,
            original: address,
            destination: Backend::alone(address),
            caller: Caller::App,
        };
        carry(Io::new(stream), flow).await;
    });
    let connector =
        tower::service_fn(
            move |_: Uri| async move { TcpStream::connect(near).await.map(TokioIo::new) },
        );
    EchoServiceClient::new(
        Endpoint::from_static("http://grpc-server")
            .connect_with_connector(connector)
            .await
            .unwrap(),
    )
}

async fn server() -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::spawn(
        Server::builder()
            .add_service(EchoServiceServer::new(Echo))
            .serve_with_incoming(TcpListenerStream::new(listener)),
    );
    address
}

#[test]
fn forwards_unary_and_streaming_calls() {
    on_worker(async {
        let mut client = client_through(&Mesh::new(), server().await).await;
        for size in [1, 1000, 1_000_000] {
            let message = "m".repeat(size);
            let echoed = client
                .echo(EchoRequest {
                    message: message.clone(),
                })
                .await
                .unwrap()
                .into_inner();
            assert!(echoed == response(message), "{size}");
        }
        let messages = ["one", "two", "three"].map(|message| EchoRequest {
            message: message.into(),
        });
        let echoed = client
            .echo_stream(tokio_stream::iter(messages))
            .await
            .unwrap()
            .into_inner();
        let echoed: Vec<_> = echoed.map(|echoed| echoed.unwrap().message).collect().await;
        assert_eq!(echoed, ["one", "two", "three"]);
    });
}

#[test]
fn marks_grpc_status_of_proxy_with_mesh_error() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut client = client_through(&mesh, server().await).await;
        let status = client
            .echo(EchoRequest {
                message: "?".into(),
            })
            .await
            .unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (Code::NotFound, "no echo")
        );
        assert!(!status.metadata().contains_key("x-mesh-error"));
        let mut client = client_through(&mesh, closed_address()).await;
        let status = client.echo(EchoRequest::default()).await.unwrap_err();
        assert_eq!(
            (
                status.code(),
                status.metadata().get("x-mesh-error").unwrap().as_bytes()
            ),
            (Code::Unavailable, &b"connect-failed"[..])
        );
        assert!(
            status.message().starts_with("cannot connect to 127.0.0.1"),
            "{status}"
        );
    });
}
