//! Telemetry, from the controller's message to what the proxy tells about requests.

use std::io::Write;
use std::sync::Mutex;

use serde_json::Value;

use super::pod::Pod;
use super::*;
use crate::observe::dump::{DumpConfig, Dumps, Format, Mode};

/// The output of dumps and of the access log.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Output {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// So many lines, once they are written.
    async fn lines(&self, count: usize) -> Vec<String> {
        until(|| self.text().lines().count() >= count).await;
        self.text().lines().map(str::to_owned).collect()
    }

    fn dumps(&self, mode: Mode, context: &WorkerContext) -> Dumps {
        let config = DumpConfig {
            mode,
            format: Format::Text,
            out: Box::new(self.clone()),
        };
        Dumps::start(config, context.metrics.clone()).unwrap()
    }
}

async fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

/// A pod without dumps, and its output.
fn pod(app: SocketAddr) -> (Pod, Output) {
    let output = Output::default();
    let pod = Pod::with(app, |context| WorkerContext {
        dumps: output.dumps(Mode::Off, &context),
        ..context
    });
    (pod, output)
}

impl Pod {
    async fn tell(&mut self, telemetry: proto::Telemetry) -> String {
        let workload = proto::Workload {
            telemetry: Some(telemetry),
            ..proto::Workload::default()
        };
        self.configure(workload).await
    }
}

fn access_logs(failures: bool, format: &str) -> proto::Telemetry {
    proto::Telemetry {
        name: "TrafficPolicy shop/web".to_owned(),
        access_logs: Some(proto::AccessLogs {
            failures,
            format: format.to_owned(),
            off: false,
        }),
        ..proto::Telemetry::default()
    }
}

fn fields(line: &str, names: &[&str]) -> Vec<String> {
    let line: Value = serde_json::from_str(line).unwrap();
    let field = |name: &&str| match &line[*name] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    names.iter().map(field).collect()
}

#[test]
fn access_log_has_a_line_for_each_request_and_each_connection() {
    on_worker(async {
        let (app, _) = app("web").await;
        let (mut pod, output) = pod(app);
        assert_eq!(pod.tell(access_logs(false, "JSON")).await, "");
        pod.http1(Some("a"), "/x?token=secret").await;
        let names = [
            "direction",
            "protocol",
            "method",
            "path",
            "status",
            "tls",
            "identity",
        ];
        let lines = output.lines(1).await;
        let identity = "spiffe://cluster.local/ns/shop/sa/a";
        let expected = [
            "inbound", "http1", "GET", "/x?***", "200", "mutual", identity,
        ];
        assert_eq!(fields(&lines[0], &names), expected);
        let names = [
            "bytes_received",
            "attempts",
            "failure",
            "incomplete",
            "endpoint",
        ];
        assert_eq!(
            fields(&lines[0], &names),
            ["3", "1", "null", "null", "null"]
        );
        // More than the dumps of a second.
        for _ in 0..30 {
            pod.http1(None, "/").await;
        }
        assert_eq!(output.lines(31).await.len(), 31);
        let mut client = pod.connect(None).await;
        client.write_all(b"\0\0\0\x01").await.unwrap();
        client.shutdown().await.unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        let lines = output.lines(32).await;
        let names = ["protocol", "bytes_sent", "method", "tls"];
        assert_eq!(fields(&lines[31], &names), ["tcp", "4", "null", "none"]);
    });
}

#[test]
fn failures_alone_are_logged_and_only_while_the_policy_says_so() {
    on_worker(async {
        let (app, _) = app("web").await;
        let (mut pod, output) = pod(app);
        assert_eq!(
            pod.tell(access_logs(true, "{status} {failure} {path}"))
                .await,
            ""
        );
        pod.http1(None, "/fine").await;
        let mut client = pod.connect(None).await;
        let malformed = b"GET /no HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n";
        client.write_all(malformed).await.unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        assert_eq!(output.lines(1).await, ["400 bad-request -"]);
        assert_eq!(pod.tell(proto::Telemetry::default()).await, "");
        let mut client = pod.connect(None).await;
        client.write_all(malformed).await.unwrap();
        client.read_to_end(&mut rest).await.unwrap();
        pod.worker.dumps.flush(std::time::Duration::from_secs(20));
        assert_eq!(output.text(), "400 bad-request -\n");
    });
}

#[test]
fn grpc_status_is_logged_and_is_a_failure() {
    on_worker(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::task::spawn_local(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                let head = Response::builder().header("content-type", "application/grpc");
                let mut stream = respond
                    .send_response(head.body(()).unwrap(), false)
                    .unwrap();
                let mut trailers = http::HeaderMap::new();
                trailers.insert("grpc-status", 14.into());
                stream.send_trailers(trailers).unwrap();
            }
        });
        let (mut pod, output) = pod(address);
        assert_eq!(pod.tell(access_logs(true, "JSON")).await, "");
        let call = Request::post("http://web/a.B/C").header("content-type", "application/grpc");
        pod.http2(Some("a"), call.body(()).unwrap()).await;
        let lines = output.lines(1).await;
        let names = ["protocol", "method", "path", "status", "grpc_status"];
        assert_eq!(
            fields(&lines[0], &names),
            ["http2", "POST", "/a.B/C", "200", "14"]
        );
    });
}

#[test]
fn telemetry_that_the_proxy_does_not_know_is_rejected() {
    on_worker(async {
        let (app, _) = app("web").await;
        let (mut pod, _) = pod(app);
        let reason = pod.tell(access_logs(false, "{later}")).await;
        let expected = "telemetry of TrafficPolicy shop/web: accessLogs.format: \"{later}\" is not";
        assert!(reason.starts_with(expected), "{reason}");
    });
}
