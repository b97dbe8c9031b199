//! http-client: calls one URL each second and prints each response; a call that fails is printed and the next one is made.
//!
//! Keeps its connections alive, as ordinary clients do. Knows nothing of the mesh.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use diy_mesh_sample_apps::config::{ClientConfig, Program};
use diy_mesh_sample_apps::heard::Hearing;
use diy_mesh_sample_apps::{dump, process};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{HeaderValue, USER_AGENT};
use hyper::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tower::ServiceExt;

const PROGRAM: Program = Program {
    name: "http-client",
    about: "Calls a URL each second, and prints each response",
};
const DEFAULT_ENDPOINT: &str = "http://http-server.http-server.svc.cluster.local./hello";
const AGENT: &str = concat!("diy-http-client/", env!("CARGO_PKG_VERSION"));
const EACH: Duration = Duration::from_secs(1);
/// How long one call may take, from the look-up of the name to the last byte of the body.
const TIMEOUT: Duration = Duration::from_secs(5);
/// What a response's body may hold: it is printed, so it is kept.
const BODY_LIMIT: usize = 1024 * 1024;

fn main() -> ExitCode {
    process::run(
        PROGRAM.name,
        ClientConfig::read(PROGRAM, DEFAULT_ENDPOINT),
        |config, stop| async move {
            stop.run_until_cancelled(call_each_second(config.endpoint))
                .await
                .unwrap_or(Ok(()))
        },
    )
}

async fn call_each_second(endpoint: Uri) -> anyhow::Result<()> {
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(TIMEOUT));
    let connector = tcp.map_response(|connection: TokioIo<TcpStream>| {
        TokioIo::new(Hearing::new(connection.into_inner()))
    });
    let client = Client::builder(TokioExecutor::new())
        .http1_title_case_headers(true)
        .pool_timer(TokioTimer::new())
        .build(connector);

    let mut seconds = interval(EACH);
    seconds.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut responses = 0_u64;
    loop {
        seconds.tick().await;
        let block = match timeout(TIMEOUT, call(&client, &endpoint)).await {
            Ok(Ok(dump)) => {
                responses += 1;
                format!("Response #{responses}\n{dump}")
            }
            Ok(Err(error)) => format!("Request failed: {endpoint}: {}", chain(&*error)),
            Err(_) => format!(
                "Request failed: {endpoint}: no answer within {} s",
                TIMEOUT.as_secs()
            ),
        };
        process::print(&block).context("cannot print")?;
    }
}

/// One call: gives the dump of the response.
async fn call<C>(
    client: &Client<C, Empty<Bytes>>,
    endpoint: &Uri,
) -> Result<String, Box<dyn Error + Send + Sync>>
where
    C: Connect + Clone + Send + Sync + 'static,
{
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = endpoint.clone();
    request
        .headers_mut()
        .insert(USER_AGENT, HeaderValue::from_static(AGENT));
    let (parts, body) = client.request(request).await?.into_parts();
    let body = Limited::new(body, BODY_LIMIT).collect().await?.to_bytes();
    Ok(dump::response(&parts, &body))
}

/// An error with its causes: hyper's own words say only in which phase it happened.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
