//! grpc-server: echoes messages, one by one and on bidirectional streams, prints each, and tells its health.
//!
//! Knows nothing of the mesh.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use diy_mesh_proto::echo::v1::echo_service_server::{EchoService, EchoServiceServer, SERVICE_NAME};
use diy_mesh_proto::echo::v1::{EchoRequest, EchoResponse};
use diy_mesh_sample_apps::config::{Program, ServerConfig};
use diy_mesh_sample_apps::{dump, listen, process};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::server::{HealthReporter, health_reporter};

const PROGRAM: Program = Program {
    name: "grpc-server",
    about: "Echoes gRPC messages, and prints each one that it gets",
};
/// How long requests in flight may take once the program is told to stop.
const DRAIN: Duration = Duration::from_secs(10);
/// Answers of one stream that may wait for a slow client before its next message is read.
const WAITING: usize = 8;

fn main() -> ExitCode {
    process::run(PROGRAM.name, ServerConfig::read(PROGRAM), serve)
}

async fn serve(config: ServerConfig, stop: CancellationToken) -> anyhow::Result<()> {
    let listener = listen::dual_stack(config.listen_port)?;
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
    let drained_too_long = async {
        stop.cancelled().await;
        end_health_watches(health).await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        result = server => result?,
        () = drained_too_long => {
            eprintln!("grpc-server: stopped with requests in flight, {} s after it was told to", DRAIN.as_secs());
        }
    }
    Ok(())
}

/// Those who watch the health learn that it is over, and their streams end: they would hold up the shutdown otherwise.
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
        self.0.answer("Echo", &metadata, message).map(Response::new)
    }

    async fn echo_stream(
        &self,
        request: Request<Streaming<EchoRequest>>,
    ) -> Result<Response<Self::EchoStreamStream>, Status> {
        let (metadata, _, messages) = request.into_parts();
        let (answers, stream) = mpsc::channel(WAITING);
        tokio::spawn(echo_messages(self.0.clone(), metadata, messages, answers));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Answers each message as it comes, until the client has no more, one fails, or the program stops: then the stream ends in good order.
async fn echo_messages(
    shared: Arc<Shared>,
    metadata: MetadataMap,
    mut messages: Streaming<EchoRequest>,
    answers: mpsc::Sender<Result<EchoResponse, Status>>,
) {
    while let Some(Ok(Some(EchoRequest { message }))) =
        shared.stop.run_until_cancelled(messages.message()).await
    {
        let answer = shared.answer("EchoStream", &metadata, message);
        let failed = answer.is_err();
        if answers.send(answer).await.is_err() || failed {
            return;
        }
    }
}

impl Shared {
    /// Prints one message and makes its answer, or the failure that was asked for.
    fn answer(
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
        let mut block = format!("Request #{number}\n/{SERVICE_NAME}/{method}");
        dump::write_headers(&mut block, &metadata.clone().into_headers());
        dump::write_message(&mut block, &message);
        // A server whose output nobody reads goes on serving.
        process::print(&format!("{block}---\n{outcome}")).ok();
        match fails {
            true => Err(Status::internal("Internal server error")),
            false => Ok(EchoResponse {
                message,
                hostname: self.config.hostname.clone(),
                version: self.config.version.clone(),
            }),
        }
    }
}
