//! TrafficSplits and HTTPRouteGroups of the Service Mesh Interface in a sandbox.

use std::time::Instant;

use diy_mesh_sandbox::Sandbox;
use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_tests::routes::{binomial_bounds, route_group, servers, traffic_split};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, controller_logs, request_until, response_until, shell, single_pod,
    versions, with_mesh,
};

fn mesh() -> Option<(Sandbox, PodView)> {
    let sandbox = with_mesh(&format!("{}---{}", servers("shop"), shell(MESHED)))?;
    let client = single_pod(&sandbox, "clients", "shell");
    response_until(&sandbox, &client, "/hello", "", "200 Version: 1.0");
    Some((sandbox, client))
}

#[test]
fn requests_follow_the_weights_of_a_split() {
    let Some((sandbox, client)) = mesh() else {
        return;
    };
    let split = |percentage| sandbox.apply(&traffic_split("shop", percentage, ""));
    split(30).unwrap();
    response_until(&sandbox, &client, "/hello", "", "200 Version: 2.0");
    let [first, second] = versions(&sandbox, &client, 400);
    assert_eq!(first + second, 400, "all requests succeed");
    let bounds = binomial_bounds(400, 0.3);
    assert!(bounds.contains(&second), "{second} of 400, {bounds:?}");
    let accepted = "TrafficSplit shop/web, parent Service web: Accepted=True";
    controller_logs(&sandbox, &[accepted]);
    split(100).unwrap();
    let deadline = Instant::now() + READY_TIMEOUT;
    while versions(&sandbox, &client, 50) != [0, 50] {
        assert!(Instant::now() < deadline, "a share of the requests stays");
    }
    sandbox.delete("TrafficSplit", "shop", "web").unwrap();
    response_until(&sandbox, &client, "/hello", "", "200 Version: 1.0");
    assert_eq!(versions(&sandbox, &client, 50), [50, 0]);
}

#[test]
fn split_of_a_group_concerns_its_requests_only() {
    let Some((sandbox, client)) = mesh() else {
        return;
    };
    let group = |value: &str| {
        let headers = format!("{{x-tester: '{value}'}}");
        sandbox.apply(&route_group("shop", &headers)).unwrap();
    };
    group("[ab]");
    let split = traffic_split("shop", 100, "testers");
    sandbox.apply(&split).unwrap();
    let (a, b, c) = ["a", "b", "c"]
        .map(|value| format!("X-Tester: {value}\\r\\n"))
        .into();
    response_until(&sandbox, &client, "/hello", &a, "200 Version: 2.0");
    for (fields, version) in [(&a, "2.0"), (&b, "2.0"), (&c, "1.0")].repeat(5) {
        let is_any = |response: &str| !response.is_empty();
        let service = ("web.shop", 80);
        let response = request_until(&sandbox, &client, "GET /hello", service, fields, is_any);
        let expected = format!("Version: {version}");
        assert!(response.stdout.contains(&expected), "{fields}{response:?}");
    }
    // The application has the other requests, of each path.
    assert_eq!(versions(&sandbox, &client, 50), [50, 0]);
    response_until(&sandbox, &client, "/none", "", "404 this server");
    group("c");
    response_until(&sandbox, &client, "/hello", &c, "200 Version: 2.0");
    response_until(&sandbox, &client, "/hello", &a, "200 Version: 1.0");
    // Without its group, the split does not apply.
    sandbox.delete("HTTPRouteGroup", "shop", "testers").unwrap();
    response_until(&sandbox, &client, "/hello", &c, "200 Version: 1.0");
    let missing = "the HTTPRouteGroup shop/testers does not exist";
    controller_logs(&sandbox, &["TrafficSplit shop/web", missing]);
}
