//! http-client: sends a GET request each interval and prints the response or the error. Keeps its
//! connection alive.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use diy_mesh_sample_apps::config::ClientConfig;
use diy_mesh_sample_apps::{dump, process};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{HeaderValue, USER_AGENT};
use hyper::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::timeout;

const NAME: &str = "http-client";
const ABOUT: &str = "Requests a URL each interval and prints the responses";
const DEFAULT_ENDPOINT: &str = "http://http-server.http-server.svc.cluster.local./hello";
const USER_AGENT_VALUE: &str = concat!("diy-http-client/", env!("CARGO_PKG_VERSION"));
/// Limit from the name lookup to the last byte of the response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of a response body, which is buffered for printing.
const MAX_BODY_BYTES: usize = 1024 * 1024;

fn main() -> ExitCode {
    let config = ClientConfig::read(NAME, ABOUT, DEFAULT_ENDPOINT);
    process::run(NAME, |stop| async move {
        let requests = send_requests(config);
        stop.run_until_cancelled(requests).await.unwrap_or(Ok(()))
    })
}

async fn send_requests(config: ClientConfig) -> anyhow::Result<()> {
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(REQUEST_TIMEOUT));
    let client = Client::builder(TokioExecutor::new())
        .http1_title_case_headers(true)
        .pool_timer(TokioTimer::new())
        .build(tcp);

    let (endpoint, mut ticks) = (&config.endpoint, config.interval());
    let mut responses = 0_u64;
    loop {
        ticks.tick().await;
        let block = match timeout(REQUEST_TIMEOUT, send_request(&client, endpoint)).await {
            Ok(Ok(dump)) => {
                responses += 1;
                format!("Response #{responses}\n{dump}")
            }
            Ok(Err(error)) => format!("Request failed: {endpoint}: {error:#}"),
            Err(_) => format!(
                "Request failed: {endpoint}: no answer within {} s",
                REQUEST_TIMEOUT.as_secs()
            ),
        };
        process::print(&block).context("cannot print")?;
    }
}

/// Sends one request and returns the dump of the response.
async fn send_request(
    client: &Client<HttpConnector, Empty<Bytes>>,
    endpoint: &Uri,
) -> anyhow::Result<String> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = endpoint.clone();
    request
        .headers_mut()
        .insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE));
    let (parts, body) = client.request(request).await?.into_parts();
    let body = Limited::new(body, MAX_BODY_BYTES)
        .collect()
        .await
        .map_err(anyhow::Error::from_boxed)?
        .to_bytes();
    Ok(dump::response(&parts, &body))
}
