//! Requests that an authorization server could read in another way than the application.

use super::*;

const ALLOWING: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

/// The response in both versions of HTTP: whether it is 400.
async fn is_refused(pod: &Pod, path: &str, fields: &[(&str, &str)]) -> [bool; 2] {
    let mut client = pod.connect(None).await;
    let lines = fields
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"));
    let lines: String = lines.collect();
    let head = format!("GET {path} HTTP/1.1\r\nHost: web\r\nConnection: close\r\n{lines}\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let response = String::from_utf8(rest(client).await).unwrap();
    let get = fields.iter().fold(
        Request::get(format!("http://web{path}")),
        |get, (name, value)| get.header(*name, *value),
    );
    let fields = pod.http2(None, get.body(()).unwrap()).await;
    let is_bad = |code: &http::HeaderValue| code == "bad-request";
    [
        response.starts_with(REFUSED),
        fields.get("x-mesh-error").is_some_and(is_bad),
    ]
}

#[test]
fn path_with_other_elements_never_leaves_the_prefix_of_a_server() {
    on_worker(async {
        for fail_open in [false, true] {
            for prefix in ["/check", ""] {
                let (app, _) = app2("web").await;
                let (address, server) = server(ALLOWING).await;
                let (mut pod, _mesh) = pod(app, address).await;
                let authorizer = proto::Authorizer {
                    path: prefix.to_owned(),
                    fail_open,
                    ..authorizer(Protocol::Http)
                };
                let mut asking = asking(app, authorizer);
                asking.policies[0].rules[0].requests.clear();
                pod.authorize(asking).await;
                for path in [
                    "/admin/../../healthz?delete=all",
                    "/admin/%2e%2e/%2E%2E/healthz",
                    "/admin/..%2f../healthz",
                    "/admin/..;x/healthz",
                    "/admin\\..\\healthz",
                    "/admin%5Chealthz",
                    "//healthz",
                    "/admin//healthz",
                ] {
                    let expected = [!prefix.is_empty(); 2];
                    assert_eq!(is_refused(&pod, path, &[]).await, expected, "{path}");
                }
                if !prefix.is_empty() {
                    assert_eq!(text(&server), "");
                }
                for path in ["/", "/orders/", "/caf%C3%A9/a%20b?q=/../", "/cars/a;b=c"] {
                    assert_eq!(is_refused(&pod, path, &[]).await, [false; 2], "{path}");
                    assert!(text(&server).contains(&format!("GET {prefix}{path} HTTP/1.1")));
                }
            }
        }
    });
}

#[test]
fn server_gets_all_spellings_of_a_listed_field() {
    on_worker(async {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            let (app, envoy) = (app2("web").await.0, Envoy::default());
            let (http, server) = server(ALLOWING).await;
            let is_http = protocol == Protocol::Http;
            let address = if is_http { http } else { envoy.start().await };
            let (mut pod, _mesh) = pod(app, address).await;
            let authorizer = proto::Authorizer {
                request_fields: vec!["x-tenant".to_owned()],
                ..authorizer(protocol)
            };
            pod.authorize(asking(app, authorizer)).await;
            for several in [
                &[("x-tenant", "a"), ("x_tenant", "b")][..],
                &[("x_tenant", "a"), ("x-tenant", "b")],
                &[("x_tenant", "a"), ("x.tenant", "b")],
            ] {
                assert_eq!(is_refused(&pod, "/orders", several).await, [true; 2]);
            }
            for one in [
                &[("x_tenant", "evil")][..],
                &[("x-tenant", "evil"), ("X-Tenant", "other")],
            ] {
                let fields: Vec<_> = one.iter().map(|(name, value)| (*name, *value)).collect();
                let mut client = pod.connect(None).await;
                let lines = fields
                    .iter()
                    .map(|(name, value)| format!("{name}: {value}\r\n"));
                let head = format!(
                    "GET /orders HTTP/1.1\r\nHost: web\r\nConnection: close\r\n{}\r\n",
                    lines.collect::<String>()
                );
                client.write_all(head.as_bytes()).await.unwrap();
                rest(client).await;
                if is_http {
                    assert!(text(&server).ends_with("x-tenant: evil\r\n\r\n") || one.len() > 1);
                } else {
                    let asked = envoy.0.lock().unwrap().pop().unwrap();
                    let http = asked.attributes.unwrap().request.unwrap().http.unwrap();
                    assert!(
                        http.headers["x-tenant"].starts_with("evil"),
                        "{:?}",
                        http.headers
                    );
                }
            }
        }
    });
}
