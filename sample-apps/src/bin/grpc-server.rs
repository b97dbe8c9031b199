//! grpc-server: echoes messages of unary calls and bidirectional streams, prints each, and serves
//! the gRPC health protocol.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use diy_mesh_proto::echo::v1::echo_service_server::{EchoService, EchoServiceServer, SERVICE_NAME};
use diy_mesh_proto::echo::v1::{EchoRequest, EchoResponse};
use diy_mesh_sample_apps::config::ServerConfig;
use diy_mesh_sample_apps::{dump, listen, process};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::server::{HealthReporter, health_reporter};

const NAME: &str = "grpc-server";
const ABOUT: &str = "Echoes gRPC messages and prints each one";
/// Limit for requests in flight during shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Responses that one stream buffers for a slow client before it reads the next message.
const MAX_BUFFERED_RESPONSES: usize = 8;

fn main() -> ExitCode {
    let config = ServerConfig::read(NAME, ABOUT);
    process::run(NAME, |stop| serve(config, stop))
}

async fn serve(config: ServerConfig, stop: CancellationToken) -> anyhow::Result<()> {
    let listener = listen::dual_stack(config.listen_port).await?;
    eprintln!(
        "grpc-server {} listens on {}",
        config.version,
        listener.local_addr()?
    );

    let (health, health_service) = health_reporter();
    health.set_serving::<EchoServiceServer<Echo>>().await;
    let echo = Echo(Arc::new(Shared {
        config,
        requests: AtomicU64::new(0),
        stop: stop.clone(),
    }));
    let server = Server::builder()
        .add_service(health_service)
        .add_service(EchoServiceServer::new(echo))
        .serve_with_incoming_shutdown(
            listen::incoming(listener, stop.clone()),
            stop.clone().cancelled_owned(),
        );
    let drain_timeout = async {
        stop.cancelled().await;
        end_health_watches(health).await;
        tokio::time::sleep(DRAIN_TIMEOUT).await;
    };
    tokio::select! {
        result = server => result?,
        () = drain_timeout => {
            eprintln!("grpc-server: exits with requests in flight after {} s", DRAIN_TIMEOUT.as_secs());
        }
    }
    Ok(())
}

/// Sends NOT_SERVING to health watchers and ends their streams, which would delay the shutdown
/// otherwise.
async fn end_health_watches(mut health: HealthReporter) {
    for service in ["", SERVICE_NAME] {
        health
            .set_service_status(service, tonic_health::ServingStatus::NotServing)
            .await;
        health.clear_service_status(service).await;
    }
}

#[derive(Clone)]
struct Echo(Arc<Shared>);

struct Shared {
    config: ServerConfig,
    requests: AtomicU64,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl EchoService for Echo {
    type EchoStreamStream = ReceiverStream<Result<EchoResponse, Status>>;

    async fn echo(&self, request: Request<EchoRequest>) -> Result<Response<EchoResponse>, Status> {
        let (metadata, _, EchoRequest { message }) = request.into_parts();
        self.0
            .respond("Echo", &metadata, message)
            .await
            .map(Response::new)
    }

    async fn echo_stream(
        &self,
        request: Request<Streaming<EchoRequest>>,
    ) -> Result<Response<Self::EchoStreamStream>, Status> {
        let (metadata, _, messages) = request.into_parts();
        let (responses, stream) = mpsc::channel(MAX_BUFFERED_RESPONSES);
        tokio::spawn(echo_messages(self.0.clone(), metadata, messages, responses));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Echoes each message until the client ends the stream, a message fails, or the program stops;
/// then closes the stream normally.
async fn echo_messages(
    shared: Arc<Shared>,
    metadata: MetadataMap,
    mut messages: Streaming<EchoRequest>,
    responses: mpsc::Sender<Result<EchoResponse, Status>>,
) {
    while let Some(Ok(Some(EchoRequest { message }))) =
        shared.stop.run_until_cancelled(messages.message()).await
    {
        let response = shared.respond("EchoStream", &metadata, message).await;
        let failed = response.is_err();
        if responses.send(response).await.is_err() || failed {
            return;
        }
    }
}

impl Shared {
    /// Prints one message and, after the delay, returns its response or the configured failure.
    async fn respond(
        &self,
        method: &str,
        metadata: &MetadataMap,
        message: String,
    ) -> Result<EchoResponse, Status> {
        let fails = fastrand::u8(0..100) < self.config.fail_rate;
        let number = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        let outcome = if fails {
            "Failed to process request\n"
        } else {
            ""
        };
        let path = format!("/{SERVICE_NAME}/{method}");
        let block = dump::grpc_message(&path, &metadata.clone().into_headers(), &message);
        // A closed standard output does not stop the server.
        process::print(&format!("Request #{number}\n{block}---\n{outcome}")).ok();
        tokio::time::sleep(Duration::from_millis(self.config.delay_ms)).await;
        if fails {
            Err(Status::internal("Internal server error"))
        } else {
            Ok(EchoResponse {
                message,
                hostname: self.config.hostname.clone(),
                version: self.config.version.clone(),
            })
        }
    }
}
