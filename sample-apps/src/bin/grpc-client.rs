//! grpc-client: each interval calls Echo and sends a message on a long-lived bidirectional stream,
//! both over one channel. Prints the responses and errors; retries after an interval.

use std::error::Error;
use std::iter::successors;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use diy_mesh_proto::echo::v1::echo_service_client::EchoServiceClient;
use diy_mesh_proto::echo::v1::{EchoRequest, EchoResponse};
use diy_mesh_sample_apps::config::ClientConfig;
use diy_mesh_sample_apps::{dump, process};
use tokio::sync::mpsc;
use tokio::time::{Interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

const NAME: &str = "grpc-client";
const ABOUT: &str =
    "Calls Echo each interval, as unary calls and on a stream, and prints the responses";
const DEFAULT_ENDPOINT: &str = "http://grpc-server.grpc-server.svc.cluster.local.:80";
const USER_AGENT: &str = concat!("diy-grpc-client/", env!("CARGO_PKG_VERSION"));
/// Limit for one response, including the connection setup.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit for the server to close the stream after this program has closed its side.
const STREAM_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let config = ClientConfig::read(NAME, ABOUT, DEFAULT_ENDPOINT);
    process::run(NAME, |stop| run(config, stop))
}

async fn run(config: ClientConfig, stop: CancellationToken) -> anyhow::Result<()> {
    let channel = Endpoint::from(config.endpoint.clone())
        .user_agent(USER_AGENT)?
        .connect_timeout(RESPONSE_TIMEOUT)
        // Detects a peer that disappears without closing the connection.
        .http2_keep_alive_interval(2 * RESPONSE_TIMEOUT)
        .keep_alive_timeout(RESPONSE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_lazy();
    let client = Client {
        echo: EchoServiceClient::new(channel),
        responses: AtomicU64::new(0),
        config,
    };
    tokio::select! {
        result = client.run_unary_calls() => result,
        result = client.run_streams(&stop) => result,
    }
}

struct Client {
    echo: EchoServiceClient<Channel>,
    responses: AtomicU64,
    config: ClientConfig,
}

impl Client {
    async fn run_unary_calls(&self) -> anyhow::Result<()> {
        let mut echo = self.echo.clone();
        let mut ticks = self.config.interval();
        for number in 1_u64.. {
            ticks.tick().await;
            let mut request = Request::new(EchoRequest {
                message: format!("Hello #{number}"),
            });
            request.set_timeout(RESPONSE_TIMEOUT);
            match with_timeout(echo.echo(request)).await {
                Ok(response) => {
                    let (metadata, message, _) = response.into_parts();
                    self.print_response("Echo", &metadata, &message)?;
                }
                Err(status) => print_failure("Echo", &status)?,
            }
        }
        Ok(())
    }

    /// Opens a stream, uses it until it fails, and opens the next one.
    async fn run_streams(&self, stop: &CancellationToken) -> anyhow::Result<()> {
        let mut ticks = self.config.interval();
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            match stop.run_until_cancelled(self.open_stream()).await {
                None => break,
                Some(Err(status)) => print_failure("EchoStream", &status)?,
                Some(Ok(mut stream)) => {
                    let failure = self
                        .exchange_messages(&mut stream, &mut ticks, stop)
                        .await?;
                    if let Some(status) = failure {
                        print_failure("EchoStream", &status)?;
                    } else {
                        stream.close().await;
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends the first message together with the call: some servers and proxies send no response
    /// headers before it.
    async fn open_stream(&self) -> Result<EchoStream, Status> {
        let mut echo = self.echo.clone();
        let (messages, outgoing) = mpsc::channel(1);
        messages
            .try_send(stream_message(1))
            .expect("a new channel has capacity 1");
        let (metadata, responses, _) =
            with_timeout(echo.echo_stream(ReceiverStream::new(outgoing)))
                .await?
                .into_parts();
        Ok(EchoStream {
            messages,
            responses,
            metadata,
            sent: 1,
        })
    }

    /// Prints the response to each message and sends the next one. Returns the error that ended the
    /// stream, or `None` after `stop`.
    async fn exchange_messages(
        &self,
        stream: &mut EchoStream,
        ticks: &mut Interval,
        stop: &CancellationToken,
    ) -> anyhow::Result<Option<Status>> {
        loop {
            let Some(response) = stop.run_until_cancelled(stream.next_response()).await else {
                return Ok(None);
            };
            match response {
                Ok(response) => self.print_response("EchoStream", &stream.metadata, &response)?,
                Err(status) => return Ok(Some(status)),
            }
            tokio::select! {
                _ = ticks.tick() => {}
                status = stream.ended() => return Ok(Some(status)),
                () = stop.cancelled() => return Ok(None),
            }
            stream.sent += 1;
            if stream
                .messages
                .send(stream_message(stream.sent))
                .await
                .is_err()
            {
                return Ok(Some(stream.ended().await));
            }
        }
    }

    fn print_response(
        &self,
        method: &str,
        metadata: &MetadataMap,
        response: &EchoResponse,
    ) -> anyhow::Result<()> {
        let number = self.responses.fetch_add(1, Ordering::Relaxed) + 1;
        let EchoResponse {
            message,
            hostname,
            version,
        } = response;
        let path = format!("/echo.v1.EchoService/{method}");
        let message = format!(
            "Echo from the grpc-server service! Hostname: {hostname} Version: {version} Message: {message}"
        );
        let block = dump::grpc_message(&path, &metadata.clone().into_headers(), &message);
        process::print(&format!("Response #{number}\n{block}")).context("cannot print")
    }
}

struct EchoStream {
    messages: mpsc::Sender<EchoRequest>,
    responses: Streaming<EchoResponse>,
    metadata: MetadataMap,
    sent: u64,
}

impl EchoStream {
    async fn next_response(&mut self) -> Result<EchoResponse, Status> {
        with_timeout(self.responses.message())
            .await?
            .ok_or_else(|| Status::unavailable("the server ended the stream"))
    }

    /// Waits for the stream to end or fail while no response is due.
    async fn ended(&mut self) -> Status {
        match self.responses.message().await {
            Ok(None) => Status::unavailable("the server ended the stream"),
            Ok(Some(_)) => Status::internal("the server sent an unexpected response"),
            Err(status) => status,
        }
    }

    async fn close(mut self) {
        drop(self.messages);
        // The result does not matter: the program exits.
        timeout(STREAM_CLOSE_TIMEOUT, self.responses.message())
            .await
            .ok();
    }
}

async fn with_timeout<T>(response: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let timed_out =
        |_| Status::deadline_exceeded(format!("no answer within {} s", RESPONSE_TIMEOUT.as_secs()));
    timeout(RESPONSE_TIMEOUT, response)
        .await
        .map_err(timed_out)?
}

fn stream_message(number: u64) -> EchoRequest {
    EchoRequest {
        message: format!("Hello #{number} of this stream"),
    }
}

fn print_failure(method: &str, status: &Status) -> anyhow::Result<()> {
    let causes = successors(status.source(), |&error| error.source())
        .map(|error| format!(": {error}"))
        .collect::<String>();
    let (code, message) = (status.code(), status.message());
    let text =
        format!("Request failed: /echo.v1.EchoService/{method}: {code:?}: {message}{causes}");
    process::print(&text).context("cannot print")
}
