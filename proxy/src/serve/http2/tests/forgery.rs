//! Attacks on `X-Called-By` over HTTP/2, and the WebSockets that remain possible.

use std::cell::Cell;

use h2::ext::Protocol;

use super::*;

#[test]
fn rejects_inbound_http2_connect() {
    on_worker(async {
        let asked = Rc::new(Cell::new(0));
        let address = {
            let asked = asked.clone();
            app(move |_, mut respond| {
                asked.set(asked.get() + 1);
                async move { drop(respond.send_response(Response::new(()), true)) }
            })
            .await
        };
        let mut client = Mesh::new().inbound_client(address).await;
        let (response, _) = call(&mut client, Request::connect("app:80").body(()).unwrap())
            .await
            .unwrap();
        assert_local_reply(&response, 405, "connect-not-allowed");
        assert!(
            response.headers()["allow"]
                .to_str()
                .unwrap()
                .starts_with("GET, ")
        );
        assert_eq!(asked.get(), 0, "the app received it");
        let mut client = Mesh::with_arguments(Discovery::off(), " --allow-connect")
            .inbound_client(address)
            .await;
        let (response, _) = call(&mut client, Request::connect("app:80").body(()).unwrap())
            .await
            .unwrap();
        assert_eq!((response.status().as_u16(), asked.get()), (200, 1));
    });
}

fn extended(protocol: &'static str) -> Request<()> {
    Request::builder()
        .method("CONNECT")
        .uri("http://app/chat")
        .extension(Protocol::from_static(protocol))
        .body(())
        .unwrap()
}

#[test]
fn extended_connect_is_the_first_request_of_new_connections() {
    on_worker(async {
        let mut settings = h2::server::Builder::new();
        settings.enable_connect_protocol();
        let supporting = app_with(settings, echo).await;
        // It accepts connections and sends nothing.
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mesh = Mesh::with_arguments(Discovery::off(), " --connect-timeout 1");
        for (app, status) in [
            (supporting, 200),
            (named_app("plain").await, 502),
            (silent.local_addr().unwrap(), 502),
        ] {
            let destination = Backend::alone(app);
            // As after a request on a connection that is closed by now.
            destination.supports_extended_connect.set(true);
            let (direction, caller) = (Direction::Inbound, Caller::Unauthenticated);
            let mut client = connect(mesh.carry(direction, &destination, caller).await).await;
            // The idle client learns it at once.
            until(|| client.is_extended_connect_protocol_enabled()).await;
            let response = call_with(&mut client, extended("websocket"), b"a frame").await;
            assert_eq!(response.unwrap().0.status(), status);
        }
    });
}

#[test]
fn accepts_extended_connect_only_for_websockets_of_supporting_apps() {
    on_worker(async {
        let mut settings = h2::server::Builder::new();
        settings.enable_connect_protocol();
        let address = app_with(settings, |request, mut respond| async move {
            let protocol = request
                .extensions()
                .get::<Protocol>()
                .map(|protocol| protocol.as_str().to_owned());
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            let (data, _) = read_body(&mut request.into_body()).await.unwrap();
            stream
                .send_data(
                    [protocol.unwrap_or_default().as_bytes(), b": ", &data]
                        .concat()
                        .into(),
                    true,
                )
                .unwrap();
        })
        .await;
        let mesh = Mesh::new();
        let mut client = mesh.inbound_client(address).await;
        assert!(
            !client.is_extended_connect_protocol_enabled(),
            "no app has announced support"
        );
        call(&mut client, get("/")).await.unwrap();
        until(|| client.is_extended_connect_protocol_enabled()).await;
        let (response, _) = call_with(&mut client, extended("websocket"), b"a frame")
            .await
            .unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.body()[..]),
            (200, &b"websocket: a frame"[..])
        );
        let (response, _) = call(&mut client, extended("connect-udp")).await.unwrap();
        assert_eq!(response.status().as_u16(), 405);
        // An app without support.
        let mut client = mesh.inbound_client(named_app("plain").await).await;
        call(&mut client, get("/")).await.unwrap();
        let refused = call(&mut client, extended("websocket")).await.unwrap_err();
        assert_eq!(refused.reason(), Some(Reason::PROTOCOL_ERROR));
    });
}

#[test]
fn strict_pod_rejects_health_checks_of_unauthenticated_peers() {
    on_worker(async {
        let app = named_app("app").await;
        let mesh = Mesh::with_arguments(Discovery::off(), " --inbound strict");
        let mut client = mesh.inbound_client(app).await;
        let check = grpc("/grpc.health.v1.Health/Check");
        let (response, _) = call_with(&mut client, check, b"\0\0\0\0\0").await.unwrap();
        assert_eq!(response.headers()["x-mesh-error"], "mtls-required");
    });
}
