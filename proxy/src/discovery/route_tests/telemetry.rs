//! Telemetry, from the controller's message to what the proxy tells about requests.

use diy_mesh_model::identity::Identity;
use diy_mesh_proto::otlp::any_value::Value as Attribute;
use diy_mesh_proto::otlp::span::SpanKind;
use diy_mesh_proto::otlp::trace_service_server::{TraceService, TraceServiceServer};
use diy_mesh_proto::otlp::{ExportTraceServiceRequest, ExportTraceServiceResponse, Span};
use diy_mesh_testkit::output::Output;
use serde_json::Value;
use tokio_stream::wrappers::TcpListenerStream;

use std::sync::Mutex;

use super::pod::Pod;
use super::*;
use crate::http::trace_context::SpanContext;
use crate::limits::memory::Memory;
use crate::observe::dump::{DumpConfig, Dumps, Format, Mode};
use crate::serve::trace;

/// So many lines, once they are written.
async fn read_lines(output: &Output, count: usize) -> Vec<String> {
    until(|| output.text().lines().count() >= count).await;
    output.text().lines().map(str::to_owned).collect()
}

fn dumps(output: &Output, mode: Mode, context: &WorkerContext) -> Dumps {
    let config = DumpConfig {
        mode,
        format: Format::Text,
        out: Box::new(output.clone()),
    };
    Dumps::start(config, context.metrics.clone()).unwrap()
}

/// A pod without dumps, and its output.
fn pod(app: SocketAddr) -> (Pod, Output) {
    let output = Output::default();
    let pod = Pod::with(app, |context| WorkerContext {
        dumps: dumps(&output, Mode::Off, &context),
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
        let lines = read_lines(&output, 1).await;
        let identity = "spiffe://cluster.local/ns/shop/sa/a";
        let expected = ["inbound", "http1", "GET", "/x?***", "200", "mtls", identity];
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
        assert_eq!(read_lines(&output, 31).await.len(), 31);
        let mut client = pod.connect(None).await;
        client.write_all(b"\0\0\0\x01").await.unwrap();
        client.shutdown().await.unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        let lines = read_lines(&output, 32).await;
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
        assert_eq!(read_lines(&output, 1).await, ["400 bad-request -"]);
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
        let (listener, address) = listen().await;
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
        let lines = read_lines(&output, 1).await;
        let names = ["protocol", "method", "path", "status", "grpc_status"];
        assert_eq!(
            fields(&lines[0], &names),
            ["http2", "POST", "/a.B/C", "200", "UNAVAILABLE"]
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

const MIB: usize = 1024 * 1024;
const COLLECTOR: &str = "o11y/otel:4317";
const SHOP: &str = "shop/web:80";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";

/// A collector that keeps what it gets. It answers while the lock is free.
#[derive(Clone, Default)]
struct Collector(
    Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    Arc<tokio::sync::Mutex<()>>,
);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        self.0.lock().unwrap().push(request.into_inner());
        let _answers = self.1.lock().await;
        Ok(tonic::Response::new(ExportTraceServiceResponse {}))
    }
}

impl Collector {
    async fn start(&self) -> SocketAddr {
        let (listener, address) = listen().await;
        let service = TraceServiceServer::new(self.clone());
        let serving = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.0.lock().unwrap();
        let spans = requests.iter().flat_map(|request| &request.resource_spans);
        let spans = spans.flat_map(|spans| &spans.scope_spans);
        spans.flat_map(|spans| spans.spans.clone()).collect()
    }
}

fn tracing(numerator: u32) -> proto::Telemetry {
    let share = |numerator| {
        Some(proto::Share {
            numerator,
            denominator: 100,
        })
    };
    proto::Telemetry {
        tracing: Some(proto::Tracing {
            backend: COLLECTOR.to_owned(),
            sampling: share(numerator),
            parent_sampling: share(100),
            attributes: vec![proto::TraceAttribute {
                name: "tenant".to_owned(),
                value: Some(proto::trace_attribute::Value::Header("x-tenant".to_owned())),
            }],
            off: false,
        }),
        ..proto::Telemetry::default()
    }
}

/// A pod whose proxy finds the backends of a mesh: the collector, and the backend of all routes.
async fn traced(mesh: &Mesh, app: SocketAddr, telemetry: proto::Telemetry) -> Pod {
    let mut pod = Pod::with(app, |context| WorkerContext {
        discovery: Discovery {
            policy: context.discovery.policy.clone(),
            ..mesh.discovery.clone()
        },
        ..context
    });
    assert_eq!(pod.tell(telemetry).await, "");
    pod
}

async fn mesh(collector: Option<SocketAddr>, web: SocketAddr) -> Mesh {
    let mut rule = to(&[(SHOP, 1)]);
    rule.name = "HTTPRoute shop/web".to_owned();
    let routes = proto::Routes {
        matches: vec![prefix("/", 0)],
        rules: vec![rule],
        ..proto::Routes::default()
    };
    let collector = collector.map(|address| (COLLECTOR, address));
    let backends: Vec<_> = collector.into_iter().chain([(SHOP, web)]).collect();
    Mesh::new(routes, &backends).await
}

impl Pod {
    /// A connection of the pod's application to [`WEB`].
    async fn outbound(&self) -> TcpStream {
        let destination = self
            .worker
            .destinations
            .get_or_watch(WEB.parse().unwrap())
            .await;
        self.carried(Direction::Outbound, Caller::App, destination)
            .await
    }

    /// The inbound path to this application at an address: all clients are one service account.
    async fn listen(&self, app: SocketAddr) -> SocketAddr {
        let (listener, address) = listen().await;
        let worker = self.worker.clone();
        tokio::task::spawn_local(async move {
            loop {
                let (stream, peer) = listener.accept().await.unwrap();
                let client = Identity::new("cluster.local", "shop", "client").unwrap();
                let flow = Flow {
                    called_by: Default::default(),
                    counted: Default::default(),
                    slot: worker.slot(),
                    worker: worker.clone(),
                    direction: Direction::Inbound,
                    peer,
                    original: app,
                    destination: Backend::alone(app),
                    caller: Caller::Peer(Arc::new(client)),
                };
                tokio::task::spawn_local(carry(Io::new(stream), flow));
            }
        });
        address
    }
}

async fn get(mut client: TcpStream, path: &str, fields: &str) -> String {
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: web:80\r\nConnection: close\r\n{fields}\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    client.read_to_string(&mut response).await.unwrap();
    response
}

fn sampled(flags: &str) -> String {
    format!("Traceparent: 00-{TRACE}-{SPAN}-{flags}\r\ntracestate: a=1\r\n")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|one| one.key == key)?;
    Some(match found.value.clone()?.value? {
        Attribute::StringValue(text) => text,
        Attribute::IntValue(number) => number.to_string(),
    })
}

#[test]
fn spans_of_both_proxies_and_of_the_application_are_one_trace() {
    on_worker(async {
        let ((app, requests), collector) = (app("web").await, Collector::default());
        // Both ends find the collector; the backend of the routes is the inbound path.
        let placeholder = mesh(Some(collector.start().await), app).await;
        let server = traced(&placeholder, app, tracing(0)).await;
        let listening = server.listen(app).await;
        let mesh = mesh(Some(collector.start().await), listening).await;
        let client = traced(&mesh, app, tracing(0)).await;
        let fields = sampled("01") + "X-Tenant: ada\r\n";
        let response = get(client.outbound().await, "/a?token=x", &fields).await;
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
        trace::export_last(&client.worker).await;
        trace::export_last(&server.worker).await;
        let spans = collector.spans();
        let [outbound, inbound] = &spans[..] else {
            panic!("{spans:?}")
        };
        for (span, kind) in [(outbound, SpanKind::Client), (inbound, SpanKind::Server)] {
            assert_eq!((span.kind(), hex(&span.trace_id)), (kind, TRACE.to_owned()));
            assert_eq!(span.name, "GET");
            let get = |key| attribute(span, key);
            assert_eq!(get("http.request.method").as_deref(), Some("GET"));
            assert_eq!(get("url.path").as_deref(), Some("/a"));
            assert_eq!(get("http.response.status_code").as_deref(), Some("200"));
            assert_eq!(get("network.protocol.version").as_deref(), Some("1.1"));
            assert_eq!(get("server.address").as_deref(), Some("web"));
            assert_eq!(get("server.port").as_deref(), Some("80"));
            assert_eq!(get("tenant").as_deref(), Some("ada"));
            assert_eq!(get("error.type"), None);
            assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
        }
        assert_eq!(hex(&outbound.parent_span_id), SPAN);
        assert_eq!(inbound.parent_span_id, outbound.span_id);
        assert_eq!(
            attribute(inbound, "service.peer.name").as_deref(),
            Some("client")
        );
        let head = requests.borrow()[0].clone();
        let own = format!("traceparent: 00-{TRACE}-{}-01\r\n", hex(&inbound.span_id));
        assert!(
            head.contains(&own) && head.contains("tracestate: a=1\r\n"),
            "{head}"
        );
        assert_eq!(
            head.to_lowercase().matches("traceparent").count(),
            1,
            "{head}"
        );
        let resource = collector.0.lock().unwrap()[1].resource_spans[0]
            .clone()
            .resource;
        let name = &resource.unwrap().attributes[0];
        assert_eq!(name.key, "service.name");
        assert_eq!(client.worker.metrics.spans.dropped.get(), 0);
    });
}

#[test]
fn http2_calls_have_spans_and_an_invalid_parent_is_ignored() {
    on_worker(async {
        let ((app, requests), collector) = (app2("web").await, Collector::default());
        let mesh = mesh(Some(collector.start().await), app).await;
        let mut telemetry = tracing(100);
        telemetry.tracing.as_mut().unwrap().attributes = vec![proto::TraceAttribute {
            name: "credentials".into(),
            value: Some(proto::trace_attribute::Value::Header(
                "authorization".into(),
            )),
        }];
        let pod = traced(&mesh, app, telemetry).await;
        let (mut client, connection) = h2::client::handshake(pod.outbound().await).await.unwrap();
        tokio::task::spawn_local(connection);
        let request = Request::post("http://web/a.B/C")
            .header("content-type", "application/grpc")
            .header("authorization", "Bearer secret")
            .header("traceparent", "invalid");
        let (response, _) = client
            .send_request(request.body(()).unwrap(), true)
            .unwrap();
        let mut body = response.await.unwrap().into_body();
        while body.data().await.is_some() {}
        until(|| requests.borrow().len() == 1).await;
        drop(client);
        let mut spans = vec![];
        until(|| {
            spans.extend(pod.worker.spans.take());
            !spans.is_empty()
        })
        .await;
        let span = &spans[0];
        assert_eq!((&*span.name, span.kind()), ("a.B/C", SpanKind::Client));
        assert_eq!(attribute(span, "rpc.system.name").as_deref(), Some("grpc"));
        assert_eq!(attribute(span, "rpc.method").as_deref(), Some("a.B/C"));
        let credentials = attribute(span, "credentials");
        assert_eq!(credentials.as_deref(), Some("Bearer ***"));
        assert_eq!(
            attribute(span, "network.protocol.version").as_deref(),
            Some("2")
        );
        assert!(
            span.parent_span_id.is_empty(),
            "an invalid parent is ignored"
        );
        let head = requests.borrow()[0].clone();
        let own = format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id));
        assert!(head.contains(&own) && !head.contains("invalid"), "{head}");
        assert!(SpanContext::parse(own.as_bytes()).is_some());
    });
}

#[test]
fn without_a_span_and_to_outside_the_field_passes_untouched() {
    on_worker(async {
        let ((app, requests), collector) = (app("web").await, Collector::default());
        let mesh = mesh(Some(collector.start().await), app).await;
        let off = traced(&mesh, app, proto::Telemetry::default()).await;
        let on = traced(&mesh, app, tracing(100)).await;
        let untouched = |fields: &str| {
            let head = requests.borrow_mut().pop().unwrap();
            assert!(head.contains(fields), "{head}");
        };
        get(off.outbound().await, "/", &sampled("01")).await;
        untouched(&sampled("01"));
        get(on.outbound().await, "/", &sampled("00")).await;
        untouched(&sampled("00"));
        assert!(on.worker.spans.take().is_empty());
        // The same address, of which discovery knows nothing.
        let outside = on.connect_as(Direction::Outbound, Caller::App).await;
        get(outside, "/", &sampled("01")).await;
        untouched(&sampled("01"));
        assert_eq!(on.worker.spans.take().len(), 1);
        // Exports have no spans of their own.
        let path = crate::observe::trace::EXPORT_PATH;
        get(on.outbound().await, path, "").await;
        assert!(on.worker.spans.take().is_empty());
    });
}

#[test]
fn unauthenticated_client_does_not_decide_that_the_application_samples() {
    on_worker(async {
        let (app, requests) = app("web").await;
        let mesh = mesh(None, app).await;
        let pod = traced(&mesh, app, tracing(0)).await;
        let forwarded = || requests.borrow_mut().pop().unwrap();
        let trace = |flags: &str| format!("00-{TRACE}-{SPAN}-{flags}\r\n");
        get(pod.connect(None).await, "/", &sampled("01")).await;
        let head = forwarded();
        assert!(
            head.contains(&trace("00")) && !head.contains(&trace("01")),
            "{head}"
        );
        get(
            pod.connect(None).await,
            "/",
            &format!("b3: {TRACE}-{SPAN}-1\r\n"),
        )
        .await;
        assert!(forwarded().contains(&trace("00")));
        // Others decide, and nothing is added without a parent.
        get(pod.connect(Some("a")).await, "/", &sampled("01")).await;
        let head = forwarded();
        let continued = format!("00-{TRACE}-");
        assert!(
            head.contains(&continued) && head.contains("-01\r\n"),
            "{head}"
        );
        get(pod.connect(None).await, "/", "").await;
        assert!(!forwarded().contains("traceparent"));
        // In HTTP/2, too.
        let ((app, requests), mesh) = (app2("web").await, mesh);
        let pod = traced(&mesh, app, tracing(0)).await;
        let parent = format!("00-{TRACE}-{SPAN}-01");
        let request = Request::get("http://web/").header("traceparent", parent);
        pod.http2(None, request.body(()).unwrap()).await;
        let head = requests.borrow()[0].clone();
        assert!(head.contains(&format!("00-{TRACE}-{SPAN}-00")), "{head}");
    });
}

#[test]
fn requests_are_counted_by_their_traces_while_tracing_is_on() {
    on_worker(async {
        let (app, _) = app("web").await;
        let mesh = mesh(None, app).await;
        let off = traced(&mesh, app, proto::Telemetry::default()).await;
        let none = traced(&mesh, app, tracing(0)).await;
        let b3 = format!("b3: {TRACE}-{SPAN}\r\n");
        let export = crate::observe::trace::EXPORT_PATH;
        for direction in [Direction::Inbound, Direction::Outbound] {
            let send = async |pod: &Pod, path, fields: &str| {
                get(pod.connect_as(direction, Caller::App).await, path, fields).await;
            };
            for fields in [&sampled("01"), &sampled("00"), &b3] {
                send(&none, "/", fields).await;
            }
            send(&none, "/", "").await;
            send(&none, "/", "traceparent: invalid\r\n").await;
            send(&none, export, "").await;
            send(&off, "/", "").await;
        }
        let counts = |pod: &Pod| {
            let page = pod.worker.metrics.render();
            ["inbound_traced", "outbound_traced", "outbound_untraced"].map(|kind| {
                let start = format!("diy_mesh_proxy_{kind}_requests_total ");
                let value = page.lines().find_map(|line| line.strip_prefix(&start));
                value.unwrap().to_owned()
            })
        };
        assert_eq!(counts(&none), ["3", "3", "2"]);
        assert_eq!(counts(&off), ["0", "0", "0"]);
        // The proxy adds a trace for the application.
        let on = traced(&mesh, app, tracing(100)).await;
        for direction in [Direction::Inbound, Direction::Outbound] {
            get(on.connect_as(direction, Caller::App).await, "/", "").await;
        }
        assert_eq!(counts(&on), ["1", "0", "1"]);
    });
}

#[test]
fn collector_that_is_away_harms_no_request_and_the_bound_holds() {
    on_worker(async {
        let (app, _) = app("web").await;
        let mesh = mesh(None, app).await;
        let pod = traced(&mesh, app, tracing(100)).await;
        let mut client = pod.outbound().await;
        let mut bytes = [0; 4096];
        for _ in 0..150 {
            client
                .write_all(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n")
                .await
                .unwrap();
            let read = client.read(&mut bytes).await.unwrap();
            assert!(bytes[..read].starts_with(b"HTTP/1.1 200"));
        }
        let dropped = || pod.worker.metrics.spans.dropped.get();
        // Those beyond the bound of a second, which may have ended meanwhile.
        let (beyond, queued) = (dropped(), 150 - dropped());
        assert!(queued >= 100, "{queued}");
        trace::export_last(&pod.worker).await;
        assert_eq!(dropped(), beyond + queued);
        let page = pod.worker.metrics.render();
        assert!(
            page.contains("diy_mesh_proxy_spans_dropped_total 150\n"),
            "{page}"
        );
    });
}

#[test]
fn flood_of_an_unauthenticated_client_costs_others_no_span_while_the_collector_hangs() {
    on_worker(async {
        let ((app, _), collector) = (app("web").await, Collector::default());
        let hanging = collector.1.clone().lock_owned().await;
        let mesh = mesh(Some(collector.start().await), app).await;
        let mut telemetry = tracing(100);
        let header = |number| proto::TraceAttribute {
            name: format!("attribute-{number}"),
            value: Some(proto::trace_attribute::Value::Header(format!("x-{number}"))),
        };
        telemetry.tracing.as_mut().unwrap().attributes = (0..16).map(header).collect();
        let mut pod = Pod::with(app, |context| WorkerContext {
            discovery: Discovery {
                policy: context.discovery.policy.clone(),
                ..mesh.discovery.clone()
            },
            memory: Memory::of_bytes(2 * MIB, 1),
            ..context
        });
        assert_eq!(pod.tell(telemetry).await, "");
        tokio::task::spawn_local(trace::export(pod.worker.clone()));
        let value = "x".repeat(1500);
        let fields: String = (0..16).map(|n| format!("x-{n}: {value}\r\n")).collect();
        let flood = async |count| {
            for _ in 0..count {
                let response = get(pod.connect(None).await, "/flood", &fields).await;
                assert!(response.starts_with("HTTP/1.1 200"), "{response}");
            }
        };
        // A full batch is on its way.
        flood(20).await;
        until(|| !collector.spans().is_empty()).await;
        flood(40).await;
        assert!(
            get(pod.connect(Some("a")).await, "/other", "")
                .await
                .starts_with("HTTP/1.1 200")
        );
        flood(20).await;
        let held = pod.worker.admission.used_bytes(&[]);
        assert!(held <= 2 * MIB / 2, "{held}");
        drop(hanging);
        until(|| {
            let worker = pod.worker.clone();
            tokio::task::spawn_local(async move { trace::export_last(&worker).await });
            let spans = collector.spans();
            spans
                .iter()
                .any(|span| attribute(span, "url.path").as_deref() == Some("/other"))
        })
        .await;
        let flood: usize = (collector.spans().iter())
            .filter(|span| attribute(span, "url.path").as_deref() == Some("/flood"))
            .map(prost::Message::encoded_len)
            .sum();
        // A batch, and a quarter of the memory.
        assert!(flood < MIB * 3 / 4, "{flood}");
        assert!(pod.worker.metrics.spans.dropped.get() > 0);
    });
}
