//! The bodies of requests: what authorization servers get of them, and that applications get all.

use std::future::poll_fn;

use diy_mesh_proto::envoy::auth::attribute_context::HttpRequest;
use h2::RecvStream;

use super::*;

const PARTIAL: &str = "x-envoy-auth-partial-body";
const TIMED_OUT: &str = "HTTP/1.1 408 Request Timeout\r\n";
const CONTINUE: &str = "HTTP/1.1 100 Continue\r\n\r\n";

/// Asks a server that gets at most `max` bytes, and whose failures allow requests.
fn with_bodies(app: SocketAddr, protocol: Protocol, max: u32) -> proto::Authorization {
    let authorizer = proto::Authorizer {
        max_body: max,
        fail_open: true,
        ..authorizer(protocol)
    };
    let mut asking = asking(app, authorizer);
    asking.policies[0].action = Action::ExternalAuthWithBody.into();
    asking
}

/// A pod whose clients have one second for what its server gets of a body.
async fn hasty_pod(app: SocketAddr, server: SocketAddr) -> (Pod, Mesh) {
    let mesh = mesh(server).await;
    let hasty = WorkerContext::for_a_test(" --request-head-timeout 1").config;
    let pod = Pod::with(app, |context| WorkerContext {
        config: hasty,
        ..mesh.context(context)
    });
    (pod, mesh)
}

/// An application that answers when what it has got ends with these bytes.
async fn app_of(end: &'static str, answer: &'static str) -> (SocketAddr, Rc<RefCell<Vec<u8>>>) {
    let (listener, address) = listen().await;
    let received: Rc<RefCell<Vec<u8>>> = Rc::default();
    let shared = received.clone();
    tokio::task::spawn_local(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = stream.read(&mut bytes).await {
                shared.borrow_mut().extend_from_slice(&bytes[..read]);
                if shared.borrow().ends_with(end.as_bytes()) {
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    break;
                }
            }
        }
    });
    (address, received)
}

/// The bytes after the head.
fn body_of(received: &[u8]) -> String {
    let text = String::from_utf8_lossy(received);
    let (_, body) = text.split_once("\r\n\r\n").unwrap();
    body.to_owned()
}

impl Envoy {
    /// The only question.
    fn asked(&self) -> HttpRequest {
        let mut asked = std::mem::take(&mut *self.0.lock().unwrap());
        assert_eq!(asked.len(), 1);
        let attributes = asked.remove(0).attributes.unwrap();
        attributes.request.unwrap().http.unwrap()
    }
}

fn post(fields: &str) -> String {
    format!("POST /orders HTTP/1.1\r\nHost: web\r\nConnection: close\r\n{fields}\r\n")
}

/// Sends pieces, each of which the proxy reads alone. Returns the response.
async fn sent(pod: &Pod, pieces: &[&[u8]]) -> String {
    let mut client = pod.connect(None).await;
    client.set_nodelay(true).unwrap();
    for piece in pieces {
        client.write_all(piece).await.unwrap();
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
    String::from_utf8(rest(client).await).unwrap()
}

#[test]
fn server_gets_at_most_the_size_and_the_application_the_same_bytes() {
    on_worker(async {
        let length = |length: usize| format!("Content-Length: {length}\r\n");
        let chunked = || "Transfer-Encoding: chunked\r\n".to_owned();
        for (fields, pieces, seen, start, partial) in [
            (length(0), &[""][..], "", "", "false"),
            (String::new(), &[""], "", "", "false"),
            (length(3), &["abc"], "abc", "abc", "false"),
            (
                length(8),
                &["abcd", "efgh"],
                "abcdefgh",
                "abcdefgh",
                "false",
            ),
            (
                length(9),
                &["abcd", "efghi"],
                "abcdefghi",
                "abcdefgh",
                "true",
            ),
            (length(9), &["abcdefghi"], "abcdefghi", "abcdefgh", "true"),
            // Another protocol that the client asks for hides no body.
            (
                "Connection: upgrade\r\nUpgrade: websocket\r\n".to_owned() + &length(3),
                &["ab", "c"],
                "abc",
                "abc",
                "false",
            ),
            (chunked(), &["0\r\n\r\n"], "0\r\n\r\n", "", "false"),
            (
                chunked(),
                &["3\r\nabc\r\n", "5;x\r\nde", "fgh\r\n0\r\n", "\r\n"],
                "3\r\nabc\r\n2\r\nde\r\n3\r\nfgh\r\n0\r\n\r\n",
                "abcdefgh",
                "false",
            ),
            (
                chunked(),
                &["8\r\nabcdefgh\r\n", "1\r\ni\r\n", "0\r\nX-Sum: 9\r\n\r\n"],
                "8\r\nabcdefgh\r\n1\r\ni\r\n0\r\nX-Sum: 9\r\n\r\n",
                "abcdefgh",
                "true",
            ),
        ] {
            let end = &seen[seen.len().saturating_sub(5)..];
            let (app, received) = app_of(end, EMPTY).await;
            let envoy = Envoy::default();
            let (mut pod, _mesh) = pod(app, envoy.start().await).await;
            pod.authorize(with_bodies(app, Protocol::Grpc, 8)).await;
            let head = post(&fields);
            let pieces = pieces.iter().map(|piece| piece.as_bytes());
            let pieces: Vec<_> = std::iter::once(head.as_bytes()).chain(pieces).collect();
            for all in [&pieces[..], &[&pieces.concat()[..]]] {
                let response = sent(&pod, all).await;
                assert!(response.starts_with(OK), "{fields} {seen}: {response}");
                let asked = envoy.asked();
                assert_eq!(
                    (&*asked.body, &asked.headers[PARTIAL][..]),
                    (start, partial)
                );
                assert_eq!(asked.raw_body, start.as_bytes());
                let received = received.take();
                // The proxy may divide chunks otherwise.
                if all.len() > 1 {
                    assert_eq!(body_of(&received), seen);
                }
                assert!(!received.is_empty() && !text_of(&received).contains(PARTIAL));
            }
        }
    });
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn text_of_a_body_has_its_length_and_clients_do_not_say_that_it_is_complete() {
    on_worker(async {
        let (app, received) = app_of("END", EMPTY).await;
        let envoy = Envoy::default();
        let (mut pod, _mesh) = pod(app, envoy.start().await).await;
        pod.authorize(with_bodies(app, Protocol::Grpc, 8)).await;
        let forged = "X-Envoy-Auth-Partial-Body: false\r\nX_Envoy_Auth_Partial_Body: false\r\n";
        let head = post(&format!("{forged}Content-Length: 11\r\n"));
        let body = b"a\xff\xc3\xa4\xe2\x82b\0END";
        let response = sent(&pod, &[head.as_bytes(), body]).await;
        assert!(response.starts_with(OK), "{response}");
        let asked = envoy.asked();
        assert_eq!((&*asked.body, asked.size), ("a!\u{e4}!!b\0", 11));
        assert_eq!(asked.raw_body, &body[..8]);
        let partial: Vec<_> = asked
            .headers
            .iter()
            .filter(|(name, _)| name.contains("partial"))
            .collect();
        assert_eq!(partial, [(&PARTIAL.to_owned(), &"true".to_owned())]);
        assert!(received.borrow().ends_with(body));
    });
}

#[test]
fn http_server_gets_the_start_as_the_body_of_its_request() {
    on_worker(async {
        let app = App::new("", EMPTY).await;
        let allowing = "HTTP/1.1 204 No Content\r\nX-User: ada\r\n\r\n";
        let (address, server) = server(allowing).await;
        let (mut pod, _mesh) = pod(app.address, address).await;
        for (max, start, partial) in [
            (6, "ab\r\n\r\n", "true"),
            (12, "ab\r\n\r\ncd\r\n\r\n", "false"),
        ] {
            let mut asking = with_bodies(app.address, Protocol::Http, max);
            let fields = [PARTIAL, "content-type"].map(str::to_owned);
            asking.policies[0]
                .authorizer
                .as_mut()
                .unwrap()
                .request_fields = fields.into();
            pod.authorize(asking).await;
            let head = post(
                "X-Envoy-Auth-Partial-Body: false\r\nContent-Type: text/plain\r\nContent-Length: 12\r\n",
            );
            let mut client = pod.connect(None).await;
            let request = format!("{head}ab\r\n\r\ncd\r\n\r\n");
            exchange(&mut client, request.as_bytes(), OK.as_bytes()).await;
            let asked = std::mem::take(&mut *server.received.borrow_mut());
            let length = start.len();
            assert_eq!(
                text_of(&asked),
                format!(
                    "POST /orders HTTP/1.1\r\nHost: web\r\nContent-Length: {length}\r\n\
                     {PARTIAL}: {partial}\r\nx-mesh-questions: 1\r\n\
                     Content-Type: text/plain\r\n\r\n{start}"
                )
            );
            assert!(text(&app).ends_with("\r\n\r\nab\r\n\r\ncd\r\n\r\n"));
        }
    });
}

#[test]
fn many_small_chunks_are_read_in_order() {
    on_worker(async {
        let (app, received) = app_of("0\r\n\r\n", EMPTY).await;
        let envoy = Envoy::default();
        let (mut pod, _mesh) = pod(app, envoy.start().await).await;
        pod.authorize(with_bodies(app, Protocol::Grpc, 65_535))
            .await;
        let body: Vec<u8> = (0..65_536_u32).map(|at| b'a' + (at % 23) as u8).collect();
        let chunks: Vec<_> = body
            .iter()
            .map(|byte| format!("1\r\n{}\r\n", *byte as char))
            .collect();
        let request = post("Transfer-Encoding: chunked\r\n") + &chunks.concat() + "0\r\n\r\n";
        let response = sent(&pod, &[request.as_bytes()]).await;
        assert!(response.starts_with(OK), "{response}");
        let asked = envoy.asked();
        assert_eq!(
            (asked.raw_body == body[..65_535], &*asked.headers[PARTIAL]),
            (true, "true")
        );
        assert!(body_of(&received.borrow()) == chunks.concat() + "0\r\n\r\n");
    });
}

#[test]
fn slow_client_is_refused_in_every_failure_mode_and_the_server_not_asked() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = hasty_pod(app.address, envoy.start().await).await;
        pod.authorize(with_bodies(app.address, Protocol::Grpc, 8))
            .await;
        for fields in ["Content-Length: 9\r\n", "Transfer-Encoding: chunked\r\n"] {
            let mut client = pod.connect(None).await;
            let request = post(fields) + "2\r\nab\r\n";
            client.write_all(request.as_bytes()).await.unwrap();
            client.set_nodelay(true).unwrap();
            exchange(&mut client, b"", TIMED_OUT.as_bytes()).await;
        }
        // A call whose client waits for an answer first.
        let call = Request::post("http://web/orders").header("content-type", "application/grpc");
        let (_upload, response) = begin(&pod, call, b"\0\0\0\0\0").await;
        assert_eq!(response.await.unwrap().headers()["grpc-status"], "4");
        assert_eq!((app.got(), envoy.0.lock().unwrap().len()), ((0, 0), 0));
        let label = "direction=\"inbound\",kind=\"request-head\"";
        assert!(pod.counts(&format!("timeouts_total{{{label}}} 3\n")));
    });
}

/// Sends the start of a request in HTTP/2.
async fn begin(
    pod: &Pod,
    request: http::request::Builder,
    start: &'static [u8],
) -> (h2::SendStream<Bytes>, h2::client::ResponseFuture) {
    let (mut client, connection) = h2::client::handshake(pod.connect(None).await)
        .await
        .unwrap();
    tokio::task::spawn_local(connection);
    let (response, mut upload) = client
        .send_request(request.body(()).unwrap(), false)
        .unwrap();
    if !start.is_empty() {
        upload.send_data(Bytes::from_static(start), false).unwrap();
    }
    (upload, response)
}

#[test]
fn client_that_leaves_within_its_body_asks_nobody() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        pod.authorize(with_bodies(app.address, Protocol::Grpc, 8))
            .await;
        let used = pod.used();
        let mut client = pod.connect(None).await;
        let request = post("Content-Length: 9\r\n") + "abc";
        client.write_all(request.as_bytes()).await.unwrap();
        until(|| pod.used() > used).await;
        drop(client);
        until(|| pod.used() == used).await;
        let (mut upload, response) = begin(&pod, Request::post("http://web/orders"), b"abc").await;
        until(|| pod.used() > used).await;
        upload.send_reset(h2::Reason::CANCEL);
        drop((upload, response));
        until(|| pod.used() == used).await;
        assert_eq!((app.got(), envoy.0.lock().unwrap().len()), ((0, 0), 0));
    });
}

impl Pod {
    /// The bytes that its connections hold.
    fn used(&self) -> usize {
        self.worker.admission.used_bytes(&[])
    }
}

#[test]
fn body_is_charged_while_it_is_held_and_no_longer() {
    on_worker(async {
        let (app, received) = app_of("END", EMPTY).await;
        let (address, server) = server("").await;
        let (mut pod, _mesh) = pod(app, address).await;
        let mut slow = with_bodies(app, Protocol::Http, 65_535);
        slow.policies[0].authorizer.as_mut().unwrap().timeout = 500;
        pod.authorize(slow).await;
        let body = "a".repeat(60_000) + "END";
        let mut client = pod.connect(None).await;
        let request = post(&format!("Content-Length: {}\r\n", body.len())) + &body;
        client.write_all(request.as_bytes()).await.unwrap();
        until(|| server.received.borrow().ends_with(b"END")).await;
        // The body, and the question with a copy of it.
        assert!(pod.used() >= 3 * 60_000, "{}", pod.used());
        // Without an answer, it passes.
        exchange(&mut client, b"", OK.as_bytes()).await;
        drop(client);
        until(|| pod.used() == 0).await;
        assert!(body_of(&received.borrow()) == body);
        // The same in HTTP/2, where the application reads nothing.
        let (mut upload, response) = begin(&pod, Request::post("http://web/orders"), b"").await;
        until(|| pod.used() > 0).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let before = pod.used();
        server.received.borrow_mut().clear();
        upload.send_data(body.into(), true).unwrap();
        until(|| server.received.borrow().ends_with(b"END")).await;
        assert!(pod.used() >= before + 3 * 60_000, "{before} {}", pod.used());
        upload.send_reset(h2::Reason::CANCEL);
        drop((upload, response));
        until(|| pod.used() == 0).await;
    });
}

#[test]
fn client_without_memory_for_its_body_is_refused() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let mesh = mesh(envoy.start().await).await;
        let mut pod = Pod::with(app.address, |context| WorkerContext {
            memory: Memory::of_bytes(48 * 1024, context.config.workers),
            ..mesh.context(context)
        });
        pod.authorize(with_bodies(app.address, Protocol::Grpc, 65_535))
            .await;
        let head = post("Content-Length: 65536\r\n");
        let response = sent(&pod, &[head.as_bytes(), &[b'a'; 60_000]]).await;
        assert!(!response.starts_with(OK), "{response}");
        let (mut upload, response) = begin(&pod, Request::post("http://web/orders"), b"").await;
        upload.send_data(vec![b'a'; 60_000].into(), false).unwrap();
        assert!(response.await.is_ok_and(|head| head.status() == 503));
        assert_eq!((app.got(), envoy.0.lock().unwrap().len()), ((0, 0), 0));
    });
}

#[test]
fn client_that_expects_100_gets_one() {
    on_worker(async {
        let answer = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n\
             HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        let (app, received) = app_of("END", answer).await;
        let envoy = Envoy::default();
        let (mut pod, _mesh) = pod(app, envoy.start().await).await;
        pod.authorize(with_bodies(app, Protocol::Grpc, 8)).await;
        let head = post("Expect: 100-continue\r\nContent-Length: 3\r\n");
        let mut client = pod.connect(None).await;
        exchange(&mut client, head.as_bytes(), CONTINUE.as_bytes()).await;
        client.write_all(b"END").await.unwrap();
        let response = String::from_utf8(rest(client).await).unwrap();
        let expected = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n";
        assert!(response.starts_with(expected), "{response}");
        assert!(text_of(&received.borrow()).contains("Expect: 100-continue\r\n"));
        assert_eq!(envoy.asked().body, "END");
        // HTTP/1.0 has no such response, and a body that is there needs none.
        let old = head.replace("HTTP/1.1", "HTTP/1.0");
        for head in [old, head] {
            received.borrow_mut().clear();
            let response = sent(&pod, &[format!("{head}END").as_bytes()]).await;
            assert_eq!(envoy.asked().body, "END");
            assert!(response.contains("HTTP/1.1 200 OK"), "{response}");
        }
        let request = Request::post("http://web/orders").header("expect", "100-continue");
        let (mut upload, mut response) = begin(&pod, request, b"").await;
        let interim = poll_fn(|cx| response.poll_informational(cx)).await;
        assert_eq!(interim.unwrap().unwrap().status(), 100);
        upload.send_data(Bytes::from_static(b"END"), true).unwrap();
        until(|| envoy.0.lock().unwrap().len() == 1).await;
        assert_eq!(envoy.asked().body, "END");
    });
}

/// An application of HTTP/2 that refuses the first `refused` requests once it has got some of them, and
/// returns the bodies of others.
async fn echo(refused: usize) -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::task::spawn_local(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let mut requests = 0;
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            requests += 1;
            let mut body = request.into_body();
            if requests <= refused {
                let _ = poll_fn(|cx| {
                    let _ = connection.poll_closed(cx);
                    body.poll_data(cx)
                })
                .await;
                respond.send_reset(h2::Reason::REFUSED_STREAM);
                continue;
            }
            tokio::task::spawn_local(async move {
                let mut upload = respond.send_response(Response::new(()), false).unwrap();
                while let Some(Ok(data)) = body.data().await {
                    body.flow_control().release_capacity(data.len()).unwrap();
                    upload.send_data(data, false).unwrap();
                }
                match body.trailers().await {
                    Ok(Some(trailers)) => upload.send_trailers(trailers).unwrap(),
                    _ => upload.send_data(Bytes::new(), true).unwrap(),
                }
            });
        }
    });
    address
}

async fn all(body: &mut RecvStream) -> Vec<u8> {
    let mut read = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        body.flow_control().release_capacity(data.len()).unwrap();
        read.extend_from_slice(&data);
    }
    read
}

#[test]
fn http2_body_and_trailers_pass_unchanged_whatever_their_size() {
    on_worker(async {
        for (max, size, has_trailers) in [
            (8, 0, false),
            (8, 8, false),
            (8, 8, true),
            (8, 9, false),
            (20_000, 60_000, true),
            (65_535, 65_535, true),
            (65_535, 200_000, false),
            (65_535, 200_000, true),
        ] {
            let (app, envoy) = (echo(0).await, Envoy::default());
            let (mut pod, _mesh) = pod(app, envoy.start().await).await;
            pod.authorize(with_bodies(app, Protocol::Grpc, max)).await;
            let sent: Vec<u8> = (0..size).map(|at: u32| b'a' + (at % 23) as u8).collect();
            let (mut upload, response) = begin(&pod, Request::post("http://web/orders"), b"").await;
            upload
                .send_data(sent.clone().into(), !has_trailers)
                .unwrap();
            if has_trailers {
                let sum = [("x-sum".parse().unwrap(), "9".parse().unwrap())];
                upload.send_trailers(sum.into_iter().collect()).unwrap();
            }
            let mut body = response.await.unwrap().into_body();
            assert!(all(&mut body).await == sent, "{max} {size}");
            let trailers = body.trailers().await.unwrap();
            assert_eq!(trailers.is_some(), has_trailers, "{max} {size}");
            let asked = envoy.asked();
            let start = &sent[..sent.len().min(max as usize)];
            assert!(asked.raw_body == start, "{max} {size}");
            let is_partial = (size > max).to_string();
            assert_eq!(asked.headers[PARTIAL], is_partial, "{max} {size}");
        }
    });
}

#[test]
fn stream_that_never_ends_passes_after_its_start() {
    on_worker(async {
        let (app, envoy) = (echo(0).await, Envoy::default());
        let (mut pod, _mesh) = hasty_pod(app, envoy.start().await).await;
        pod.authorize(with_bodies(app, Protocol::Grpc, 4)).await;
        let call = Request::post("http://web/orders").header("content-type", "application/grpc");
        let (mut upload, response) = begin(&pod, call, b"first").await;
        let mut body = response.await.unwrap().into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "first");
        upload
            .send_data(Bytes::from_static(b"second"), false)
            .unwrap();
        assert_eq!(body.data().await.unwrap().unwrap(), "second");
        let asked = envoy.asked();
        assert_eq!((&*asked.body, &*asked.headers[PARTIAL]), ("firs", "true"));
    });
}

#[test]
fn refused_stream_is_sent_again_with_all_of_its_body() {
    on_worker(async {
        let (app, envoy) = (echo(1).await, Envoy::default());
        let (mut pod, _mesh) = pod(app, envoy.start().await).await;
        pod.authorize(with_bodies(app, Protocol::Grpc, 16_000))
            .await;
        let sent: Vec<u8> = (0..14_000_u32).map(|at| b'a' + (at % 23) as u8).collect();
        let (mut upload, response) = begin(&pod, Request::post("http://web/orders"), b"").await;
        for piece in sent.chunks(5_000) {
            upload.send_data(piece.to_vec().into(), false).unwrap();
        }
        upload.send_data(Bytes::new(), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(all(&mut response.into_body()).await == sent);
    });
}

#[test]
fn routes_ask_with_bodies_too_and_each_server_gets_its_size() {
    on_worker(async {
        let (app, _received) = app_of("END", EMPTY).await;
        let envoy = Envoy::default();
        let (mut pod, _mesh) = pod(app, envoy.start().await).await;
        let of_route = proto::Authorizer {
            max_body: 7,
            ..authorizer(Protocol::Grpc)
        };
        let mut asking = with_bodies(app, Protocol::Grpc, 4);
        let routes = routes(app, &of_route, &[("/", true)]);
        asking.policies.extend(routes.policies);
        asking.policies[1].action = Action::ExternalAuthWithBody.into();
        pod.authorize(asking).await;
        let head = post("Content-Length: 7\r\n");
        let response = sent(&pod, &[head.as_bytes(), b"abcdE", b"ND"]).await;
        assert!(response.starts_with(OK), "{response}");
        let asked = envoy.0.lock().unwrap().clone();
        let bodies = asked.iter().map(|one| {
            let http = one
                .attributes
                .clone()
                .unwrap()
                .request
                .unwrap()
                .http
                .unwrap();
            format!("{} {}", http.body, http.headers[PARTIAL])
        });
        assert_eq!(bodies.collect::<Vec<_>>(), ["abcd true", "abcdEND false"]);
    });
}

#[test]
fn server_without_a_size_gets_no_body_and_no_word_of_it() {
    on_worker(async {
        let (app, _received) = app_of("END", EMPTY).await;
        let envoy = Envoy::default();
        let (mut pod, _mesh) = pod(app, envoy.start().await).await;
        pod.authorize(asking(app, authorizer(Protocol::Grpc))).await;
        let head = post("X-Envoy-Auth-Partial-Body: false\r\nContent-Length: 3\r\n");
        assert!(sent(&pod, &[head.as_bytes(), b"END"]).await.starts_with(OK));
        let asked = envoy.asked();
        assert!(asked.body.is_empty() && asked.raw_body.is_empty());
        assert!(!asked.headers.contains_key(PARTIAL));
    });
}
