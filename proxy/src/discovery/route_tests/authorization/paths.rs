//! Paths that servers read in different ways, in both protocols.

use super::*;

const EMPTY: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

#[test]
fn no_number_of_slashes_and_backslashes_takes_a_request_past_a_denial() {
    on_worker(async {
        let app = App::new("", EMPTY).await;
        let mut pod = Pod::new(app.address);
        pod.authorize(on_path(Action::Deny, "/admin")).await;
        for path in [
            "///x/admin",
            "/////x/admin/users",
            "/\\/x/admin",
            "/\\\\x/admin",
            "//\\x:80/admin",
            "/.///x/admin",
            "/x/..///x/admin",
            "/%2F/x/admin",
            "/%5C/x/admin",
        ] {
            let response = pod.http1(None, path).await;
            assert!(response.starts_with(DENIED), "{path}: {response}");
            let get = Request::get(format!("http://web{path}"));
            let get = get.header("content-type", "application/grpc");
            let fields = pod.http2(None, get.body(()).unwrap()).await;
            assert_eq!(fields["x-mesh-error"], "denied", "{path}");
        }
        assert_eq!(app.got(), (0, 0));
        assert!(pod.http1(None, "///x/administrator").await.starts_with(OK));
    });
}
