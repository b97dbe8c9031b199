//! grpc-client: each second calls Echo, and sends a message on one long bidirectional stream, both over one channel; prints the answers.
//!
//! What fails is printed and tried again a second later, for ever. Knows nothing of the mesh.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use diy_mesh_proto::echo::v1::echo_service_client::EchoServiceClient;
use diy_mesh_proto::echo::v1::{EchoRequest, EchoResponse};
use diy_mesh_sample_apps::config::{ClientConfig, Program};
use diy_mesh_sample_apps::{dump, process};
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

const PROGRAM: Program = Program {
    name: "grpc-client",
    about: "Calls Echo each second, one by one and on a stream, and prints each answer",
};
const DEFAULT_ENDPOINT: &str = "http://grpc-server.grpc-server.svc.cluster.local.:80";
const AGENT: &str = concat!("diy-grpc-client/", env!("CARGO_PKG_VERSION"));
const EACH: Duration = Duration::from_secs(1);
/// How long one answer may take, the connection included.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long the server may take to end the stream once this program has ended its side.
const FAREWELL: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    process::run(
        PROGRAM.name,
        ClientConfig::read(PROGRAM, DEFAULT_ENDPOINT),
        call_each_second,
    )
}

async fn call_each_second(config: ClientConfig, stop: CancellationToken) -> anyhow::Result<()> {
    let channel = Endpoint::from(config.endpoint)
        .user_agent(AGENT)?
        .connect_timeout(TIMEOUT)
        // A peer that has vanished without a word is noticed, though the stream's own messages wait for nothing.
        .http2_keep_alive_interval(2 * TIMEOUT)
        .keep_alive_timeout(TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_lazy();
    let client = Client {
        echo: EchoServiceClient::new(channel),
        responses: AtomicU64::new(0),
    };
    tokio::select! {
        result = client.call_one_by_one() => result,
        result = client.stream_for_ever(&stop) => result,
    }
}

struct Client {
    echo: EchoServiceClient<Channel>,
    responses: AtomicU64,
}

impl Client {
    async fn call_one_by_one(&self) -> anyhow::Result<()> {
        let mut echo = self.echo.clone();
        let mut seconds = each_second();
        for number in 1_u64.. {
            seconds.tick().await;
            let mut request = Request::new(EchoRequest {
                message: format!("Hello #{number}"),
            });
            request.set_timeout(TIMEOUT);
            match answer_in_time(echo.echo(request)).await {
                Ok(response) => {
                    let (metadata, answer, _) = response.into_parts();
                    self.print_answer("Echo", &metadata, &answer)?;
                }
                Err(status) => print_failure("Echo", &status)?,
            }
        }
        Ok(())
    }

    /// Opens a stream, uses it for as long as it lasts, opens the next.
    async fn stream_for_ever(&self, stop: &CancellationToken) -> anyhow::Result<()> {
        let mut seconds = each_second();
        while stop.run_until_cancelled(seconds.tick()).await.is_some() {
            match stop.run_until_cancelled(self.open_stream()).await {
                None => break,
                Some(Err(status)) => print_failure("EchoStream", &status)?,
                Some(Ok(mut stream)) => {
                    let lost = self.use_stream(&mut stream, &mut seconds, stop).await?;
                    if let Some(status) = lost {
                        print_failure("EchoStream", &status)?;
                    } else {
                        stream.end().await;
                    }
                }
            }
        }
        Ok(())
    }

    /// The first message goes out together with the call: there are servers and proxies that answer nothing before it.
    async fn open_stream(&self) -> Result<EchoStream, Status> {
        let mut echo = self.echo.clone();
        let (messages, outgoing) = mpsc::channel(1);
        messages
            .try_send(stream_message(1))
            .expect("the channel is new and has room for one");
        let (metadata, answers, _) =
            answer_in_time(echo.echo_stream(ReceiverStream::new(outgoing)))
                .await?
                .into_parts();
        Ok(EchoStream {
            messages,
            answers,
            metadata,
            sent: 1,
        })
    }

    /// Prints the answer to each message, then sends the next; gives the reason for which the stream is over, or nothing if it is time to stop.
    async fn use_stream(
        &self,
        stream: &mut EchoStream,
        seconds: &mut Interval,
        stop: &CancellationToken,
    ) -> anyhow::Result<Option<Status>> {
        loop {
            let Some(answer) = stop.run_until_cancelled(stream.next_answer()).await else {
                return Ok(None);
            };
            match answer {
                Ok(answer) => self.print_answer("EchoStream", &stream.metadata, &answer)?,
                Err(status) => return Ok(Some(status)),
            }
            tokio::select! {
                _ = seconds.tick() => {}
                status = stream.broken() => return Ok(Some(status)),
                () = stop.cancelled() => return Ok(None),
            }
            stream.sent += 1;
            if stream
                .messages
                .send(stream_message(stream.sent))
                .await
                .is_err()
            {
                return Ok(Some(stream.broken().await));
            }
        }
    }

    fn print_answer(
        &self,
        method: &str,
        metadata: &MetadataMap,
        answer: &EchoResponse,
    ) -> anyhow::Result<()> {
        let number = self.responses.fetch_add(1, Ordering::Relaxed) + 1;
        let mut block = format!("Response #{number}\n/echo.v1.EchoService/{method}");
        dump::write_headers(&mut block, &metadata.clone().into_headers());
        let EchoResponse {
            message,
            hostname,
            version,
        } = answer;
        dump::write_message(
            &mut block,
            &format!(
                "Echo from the grpc-server service! Hostname: {hostname} Version: {version} Message: {message}"
            ),
        );
        process::print(&block).context("cannot print")
    }
}

struct EchoStream {
    messages: mpsc::Sender<EchoRequest>,
    answers: Streaming<EchoResponse>,
    metadata: MetadataMap,
    sent: u64,
}

impl EchoStream {
    async fn next_answer(&mut self) -> Result<EchoResponse, Status> {
        answer_in_time(self.answers.message())
            .await?
            .ok_or_else(|| Status::unavailable("the server ended the stream"))
    }

    /// Waits, while nothing is asked for, for the stream to end or to break.
    async fn broken(&mut self) -> Status {
        match self.answers.message().await {
            Ok(None) => Status::unavailable("the server ended the stream"),
            Ok(Some(_)) => Status::internal("the server answered a message that was never sent"),
            Err(status) => status,
        }
    }

    async fn end(mut self) {
        drop(self.messages);
        // Whatever comes now, or nothing: the program ends.
        timeout(FAREWELL, self.answers.message()).await.ok();
    }
}

async fn answer_in_time<T>(answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_| Status::deadline_exceeded(format!("no answer within {} s", TIMEOUT.as_secs()));
    timeout(TIMEOUT, answer).await.map_err(late)?
}

fn stream_message(number: u64) -> EchoRequest {
    EchoRequest {
        message: format!("Hello #{number} of this stream"),
    }
}

fn each_second() -> Interval {
    let mut seconds = interval(EACH);
    seconds.set_missed_tick_behavior(MissedTickBehavior::Skip);
    seconds
}

fn print_failure(method: &str, status: &Status) -> anyhow::Result<()> {
    let mut text = format!(
        "Request failed: /echo.v1.EchoService/{method}: {:?}: {}",
        status.code(),
        status.message()
    );
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    process::print(&text).context("cannot print")
}
