//! Tests of forwarding: heads, bodies, trailers and resets in the patterns that gRPC uses.

use std::cell::Cell;

use super::*;

#[test]
fn forwards_heads_bodies_and_trailers_unchanged() {
    on_worker(async {
        let address = app(|request, mut respond| async move {
            let (parts, mut body) = request.into_parts();
            assert_eq!(
                (
                    parts.method.as_str(),
                    parts.uri.path_and_query().unwrap().as_str()
                ),
                ("POST", "/p?q=1")
            );
            assert_eq!(parts.uri.authority().unwrap(), "app:8080");
            assert_eq!(
                parts.headers,
                fields(&[("te", "trailers"), ("x-a", "1"), ("x-b", "2"), ("x-a", "3")])
            );
            let (data, trailers) = read_body(&mut body).await.unwrap();
            assert_eq!(
                (&data[..], trailers),
                (&b"ping"[..], Some(fields(&[("x-sum", "7")])))
            );
            let response = Response::builder()
                .status(201)
                .header("set-cookie", "a")
                .header("set-cookie", "b")
                .body(())
                .unwrap();
            let mut stream = respond.send_response(response, false).unwrap();
            stream
                .send_data(Bytes::from_static(b"pong"), false)
                .unwrap();
            stream.send_trailers(fields(&[("x-took", "2")])).unwrap();
        })
        .await;
        let mesh = Mesh::new();
        let mut client = mesh.client_of(address).await;
        let request = Request::post("http://app:8080/p?q=1")
            .header("te", "trailers")
            .header("x-a", "1")
            .header("x-b", "2")
            .header("x-a", "3");
        let (response, mut stream) = client
            .send_request(request.body(()).unwrap(), false)
            .unwrap();
        stream
            .send_data(Bytes::from_static(b"ping"), false)
            .unwrap();
        stream.send_trailers(fields(&[("x-sum", "7")])).unwrap();
        let (response, trailers) = read(response.await.unwrap()).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.body()[..]),
            (201, &b"pong"[..])
        );
        assert_eq!(
            response.headers(),
            &fields(&[("set-cookie", "a"), ("set-cookie", "b")])
        );
        assert_eq!(trailers, Some(fields(&[("x-took", "2")])));
        assert_eq!(
            mesh.requests(&[
                "direction=\"outbound\"",
                "http_response_status_code=\"201\""
            ]),
            1
        );
    });
}

#[test]
fn keeps_host_field_of_request_without_authority() {
    on_worker(async {
        let address = app(|request, mut respond| async move {
            assert!(request.uri().authority().is_none() && request.headers()["host"] == "app");
            respond.send_response(Response::new(()), true).unwrap();
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let request = Request::get("/")
            .version(http::Version::HTTP_11)
            .header("host", "app")
            .body(())
            .unwrap();
        assert_eq!(call(&mut client, request).await.unwrap().0.status(), 200);
    });
}

#[test]
fn forwards_stream_messages_without_delay() {
    on_worker(async {
        let address = app(|request, mut respond| async move {
            let mut body = request.into_body();
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            while let Some(data) = body.data().await {
                let data = data.unwrap();
                body.flow_control().release_capacity(data.len()).unwrap();
                if !data.is_empty() {
                    stream
                        .send_data([&b"echo "[..], &data].concat().into(), false)
                        .unwrap();
                }
            }
            stream
                .send_trailers(fields(&[("grpc-status", "0")]))
                .unwrap();
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let (response, mut stream) = client.send_request(grpc("/echo"), false).unwrap();
        let mut body = response.await.unwrap().into_body();
        for message in ["one", "two", "three"] {
            stream
                .send_data(Bytes::from_static(message.as_bytes()), false)
                .unwrap();
            assert_eq!(
                body.data().await.unwrap().unwrap(),
                format!("echo {message}")
            );
        }
        stream.send_data(Bytes::new(), true).unwrap();
        let end = body.data().await;
        assert!(end.is_none(), "{end:?}");
        assert_eq!(
            body.trailers().await.unwrap(),
            Some(fields(&[("grpc-status", "0")]))
        );
    });
}

#[test]
fn response_may_end_before_request() {
    on_worker(async {
        let address = app(|request, mut respond| async move {
            respond.send_response(Response::new(()), true).unwrap();
            let (data, _) = read_body(&mut request.into_body()).await.unwrap();
            assert_eq!(&data[..], b"late");
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let (response, mut stream) = client.send_request(grpc("/"), false).unwrap();
        let (response, _) = read(response.await.unwrap()).await.unwrap();
        assert_eq!(response.status(), 200);
        stream.send_data(Bytes::from_static(b"late"), true).unwrap();
        let (response, _) = call_with(&mut client, grpc("/"), b"late").await.unwrap();
        assert_eq!(response.status(), 200);
    });
}

#[test]
fn forwards_apps_no_error_reset_after_response() {
    on_worker(async {
        // After the response, dropping the request's body resets the stream with NO_ERROR.
        let address = app(|_, mut respond| async move {
            drop(respond.send_response(Response::new(()), true))
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let (response, mut stream) = client.send_request(grpc("/"), false).unwrap();
        let (response, _) = read(response.await.unwrap()).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(reset_of(&mut stream).await, Reason::NO_ERROR);
    });
}

#[test]
fn forwards_reset_code_of_client() {
    on_worker(async {
        let (arrived, seen) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(None)));
        let address = app({
            let (arrived, seen) = (arrived.clone(), seen.clone());
            move |request, mut respond| {
                let (arrived, seen) = (arrived.clone(), seen.clone());
                async move {
                    arrived.set(arrived.get() + 1);
                    let answer = request.uri().path() == "/answered";
                    if answer {
                        let mut stream = respond.send_response(Response::new(()), false).unwrap();
                        seen.set(Some(reset_of(&mut stream).await));
                    } else {
                        seen.set(Some(poll_fn(|cx| respond.poll_reset(cx)).await.unwrap()));
                    }
                }
            }
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let cases = [
            ("/", Reason::CANCEL, true),
            ("/", Reason::INTERNAL_ERROR, false),
            ("/answered", Reason::CANCEL, true),
        ];
        for (index, (path, code, end)) in cases.into_iter().enumerate() {
            let (response, mut stream) = client.send_request(get(path), end).unwrap();
            until(|| arrived.get() == index + 1).await;
            if path == "/answered" {
                let _response = response.await.unwrap();
                stream.send_reset(code);
            } else {
                stream.send_reset(code);
            }
            until(|| seen.get().is_some()).await;
            assert_eq!(seen.take(), Some(code), "{path}");
        }
    });
}

#[test]
fn forwards_reset_code_of_app() {
    on_worker(async {
        let read_part = Rc::new(Cell::new(false));
        let address = app({
            let read_part = read_part.clone();
            move |request, mut respond| {
                let read_part = read_part.clone();
                async move {
                    if request.uri().path() == "/" {
                        return respond.send_reset(Reason::INADEQUATE_SECURITY);
                    }
                    let mut stream = respond.send_response(Response::new(()), false).unwrap();
                    stream
                        .send_data(Bytes::from_static(b"part"), false)
                        .unwrap();
                    until(|| read_part.get()).await;
                    stream.send_reset(Reason::ENHANCE_YOUR_CALM);
                }
            }
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let error = call(&mut client, get("/")).await.unwrap_err();
        assert_eq!(error.reason(), Some(Reason::INADEQUATE_SECURITY));
        let mut body = client
            .send_request(get("/answered"), true)
            .unwrap()
            .0
            .await
            .unwrap()
            .into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "part");
        read_part.set(true);
        let error = read_body(&mut body).await.unwrap_err();
        assert_eq!(error.reason(), Some(Reason::ENHANCE_YOUR_CALM));
    });
}

#[test]
fn closed_client_connection_cancels_its_streams() {
    on_worker(async {
        let cancelled = Rc::new(Cell::new(0));
        let address = app({
            let cancelled = cancelled.clone();
            move |_, mut respond| {
                let cancelled = cancelled.clone();
                async move {
                    let mut stream = respond.send_response(Response::new(()), false).unwrap();
                    assert_eq!(reset_of(&mut stream).await, Reason::CANCEL);
                    cancelled.set(cancelled.get() + 1);
                }
            }
        })
        .await;
        let mesh = Mesh::new();
        let stream = mesh.dial(&Backend::alone(address)).await;
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::task::spawn_local(connection);
        let mut bodies = Vec::new();
        for _ in 0..3 {
            let (response, stream) = client.send_request(get("/"), false).unwrap();
            bodies.push((response.await.unwrap(), stream));
        }
        connection.abort();
        until(|| cancelled.get() == 3).await;
    });
}

#[test]
fn forwards_large_bodies_in_both_directions() {
    const SIZE: usize = 3 * 1024 * 1024;
    on_worker(async {
        let address = app(|request, mut respond| async move {
            let mut body = request.into_body();
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            while let Some(data) = body.data().await {
                let mut data = data.unwrap();
                body.flow_control().release_capacity(data.len()).unwrap();
                while !data.is_empty() {
                    stream.reserve_capacity(data.len());
                    let room = poll_fn(|cx| stream.poll_capacity(cx))
                        .await
                        .unwrap()
                        .unwrap();
                    stream
                        .send_data(data.split_to(room.min(data.len())), false)
                        .unwrap();
                }
            }
            stream.send_data(Bytes::new(), true).unwrap();
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let sent: Bytes = (0..SIZE)
            .map(|index| (index % 251) as u8)
            .collect::<Vec<_>>()
            .into();
        let (response, mut stream) = client.send_request(grpc("/"), false).unwrap();
        // The client buffers all bytes, and sends them within the flow-control windows.
        stream.send_data(sent.clone(), true).unwrap();
        let (response, _) = read(response.await.unwrap()).await.unwrap();
        assert!(
            response.body() == &sent,
            "{} bytes came back",
            response.body().len()
        );
    });
}

#[test]
fn applies_backpressure_to_client() {
    on_worker(async {
        let address = stalled_app().await;
        let mut client = Mesh::new().client_of(address).await;
        let (_response, mut stream) = client.send_request(grpc("/"), false).unwrap();
        let sent = std::cell::Cell::new(0);
        let chunk = Bytes::from(vec![0; 16 * 1024]);
        let fill = async {
            loop {
                stream.reserve_capacity(chunk.len());
                let room = poll_fn(|cx| stream.poll_capacity(cx))
                    .await
                    .unwrap()
                    .unwrap();
                stream
                    .send_data(chunk.slice(..room.min(chunk.len())), false)
                    .unwrap();
                sent.set(sent.get() + room.min(chunk.len()));
            }
        };
        // The upload never completes. Waits until the windows are full.
        let full = async {
            while sent.get() <= 64 * 1024 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        };
        tokio::select! {
            never = fill => never,
            () = full => {}
        }
        let sent = sent.get();
        let bound = super::super::STREAM_WINDOW as usize * 2
            + crate::upstream::multiplexed::MAX_OUTPUT
            + 512 * 1024;
        assert!(
            (64 * 1024..bound).contains(&sent),
            "{sent} bytes were accepted, expected less than {bound}"
        );
    });
}

#[test]
fn forwards_100_continue() {
    on_worker(async {
        let address = app(|request, mut respond| async move {
            respond
                .send_informational(Response::builder().status(100).body(()).unwrap())
                .unwrap();
            let (data, _) = read_body(&mut request.into_body()).await.unwrap();
            assert_eq!(&data[..], b"body");
            respond.send_response(Response::new(()), true).unwrap();
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let request = Request::put("http://app/")
            .header("expect", "100-continue")
            .body(())
            .unwrap();
        let (mut response, mut stream) = client.send_request(request, false).unwrap();
        let interim = poll_fn(|cx| response.poll_informational(cx))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(interim.status(), 100);
        stream.send_data(Bytes::from_static(b"body"), true).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
    });
}

#[test]
fn forwards_a_bounded_number_of_interim_responses() {
    on_worker(async {
        let address = app(|_, mut respond| async move {
            for _ in 0..1000 {
                let interim = Response::builder().status(103).body(()).unwrap();
                respond.send_informational(interim).unwrap();
            }
            respond.send_response(Response::new(()), true).unwrap();
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let request = Request::put("http://app/").header("expect", "100-continue");
        let request = request.body(()).unwrap();
        let (mut response, _) = client.send_request(request, true).unwrap();
        let mut interim = 0;
        while let Some(Ok(_)) = poll_fn(|cx| response.poll_informational(cx)).await {
            interim += 1;
        }
        assert_eq!(interim, 16);
        assert_eq!(response.await.unwrap().status(), 200);
    });
}

#[test]
fn forwards_unrequested_interim_responses() {
    on_worker(async {
        let address = app(|_, mut respond| async move {
            let hints = Response::builder().status(103).header("link", "</a>");
            respond.send_informational(hints.body(()).unwrap()).unwrap();
            respond.send_response(Response::new(()), true).unwrap();
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let request = Request::get("http://app/").body(()).unwrap();
        let (mut response, _) = client.send_request(request, true).unwrap();
        let interim = poll_fn(|cx| response.poll_informational(cx)).await;
        let interim = interim.unwrap().unwrap();
        assert_eq!(interim.status(), 103);
        assert_eq!(interim.headers()["link"], "</a>");
        assert_eq!(response.await.unwrap().status(), 200);
    });
}

#[test]
fn forwards_connect_as_tunnel() {
    on_worker(async {
        let address = app(|request, mut respond| async move {
            assert_eq!(
                (
                    request.method().as_str(),
                    request.uri().to_string().as_str()
                ),
                ("CONNECT", "db:5432")
            );
            let mut body = request.into_body();
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            stream
                .send_data(Bytes::from_static(b"hello"), false)
                .unwrap();
            assert_eq!(body.data().await.unwrap().unwrap(), "hi");
            stream.send_data(Bytes::from_static(b"bye"), true).unwrap();
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let (response, mut stream) = client
            .send_request(Request::connect("db:5432").body(()).unwrap(), false)
            .unwrap();
        let mut body = response.await.unwrap().into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "hello");
        stream.send_data(Bytes::from_static(b"hi"), false).unwrap();
        assert_eq!(body.data().await.unwrap().unwrap(), "bye");
        assert!(body.data().await.is_none());
    });
}

#[test]
fn draining_proxy_completes_open_streams() {
    on_worker(async {
        let address = app(echo).await;
        let mesh = Mesh::new();
        let stream = mesh.dial(&Backend::alone(address)).await;
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::task::spawn_local(connection);
        let (response, mut stream) = client.send_request(grpc("/"), false).unwrap();
        stream
            .send_data(Bytes::from_static(b"before "), false)
            .unwrap();
        mesh.drain.cancel();
        // Waits for GOAWAY.
        while poll_fn(|cx| client.poll_ready(cx)).await.is_ok() {
            tokio::task::yield_now().await;
        }
        stream
            .send_data(Bytes::from_static(b"after"), true)
            .unwrap();
        let (response, _) = read(response.await.unwrap()).await.unwrap();
        assert_eq!(&response.body()[..], b"before after");
        connection.await.unwrap().unwrap();
    });
}

#[test]
fn dumps_exchanges() {
    on_worker(async {
        let address = app(|request, mut respond| async move {
            let (data, _) = read_body(&mut request.into_body()).await.unwrap();
            let response = Response::builder()
                .header("content-type", "application/grpc")
                .body(())
                .unwrap();
            let mut stream = respond.send_response(response, false).unwrap();
            stream.send_data(data, false).unwrap();
            stream
                .send_trailers(fields(&[("grpc-status", "0")]))
                .unwrap();
        })
        .await;
        let mesh = Mesh::new();
        let mut client = mesh.client_of(address).await;
        call_with(
            &mut client,
            grpc("/echo.v1.EchoService/Echo"),
            b"\0\0\0\0\x02hi",
        )
        .await
        .unwrap();
        until(|| !mesh.dumped.text().is_empty()).await;
        let dumped = mesh.dumped.text();
        let (exchange, details) = dumped.trim_end().rsplit_once('\n').unwrap();
        assert!(
            details.ends_with(&format!(" ms, endpoint {address}, no mutual TLS]")),
            "{details}"
        );
        assert_eq!(
            exchange,
            format!(
                "Outbound connection to {address}\nPOST /echo.v1.EchoService/Echo HTTP/2\nhost: app\ncontent-type: application/grpc\nte: trailers\n\n\
                 [1 gRPC message, 7 bytes]\n\nHTTP/2 200\ncontent-type: application/grpc\n\n[1 gRPC message, 7 bytes]\n\ngrpc-status: 0 (OK)\n"
            )
        );
    });
}
