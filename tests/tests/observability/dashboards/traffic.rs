//! The dashboards of a workload and of a route.

use super::panels::{CLIENT, Dashboard, REQUESTS, SERVER, quantile, quantiles, rate, success};

pub fn workload() -> Dashboard {
    let own = "namespace=\"$namespace\",workload=\"$workload\"";
    let (inbound, outbound) = (
        &format!("{own},direction=\"inbound\""),
        &format!("{own},direction=\"outbound\""),
    );
    let (peer, name) = (
        "service_peer_namespace, service_peer_name",
        "{{service_peer_namespace}}/{{service_peer_name}}",
    );
    let p99 = |metric| vec![(name, quantile(0.99, peer, metric, own))];
    let count = |legend, by, metric: &str| {
        (
            legend,
            rate(by, &format!("diy_mesh_proxy_{metric}_total"), own),
        )
    };
    Dashboard {
        name: "workload",
        title: "Workload",
        variables: &[
            (
                "namespace",
                "label_values(diy_mesh_proxy_requests_total, namespace)",
            ),
            (
                "workload",
                "label_values(diy_mesh_proxy_requests_total{namespace=\"$namespace\"}, workload)",
            ),
        ],
        rows: vec![
            (
                "Inbound",
                vec![
                    (
                        "Responses by status",
                        "reqps",
                        vec![(
                            "{{http_response_status_code}}",
                            rate("http_response_status_code", REQUESTS, inbound),
                        )],
                    ),
                    (
                        "Errors",
                        "reqps",
                        vec![(
                            "{{error_type}}",
                            rate(
                                "error_type",
                                REQUESTS,
                                &format!("{inbound},error_type!=\"\""),
                            ),
                        )],
                    ),
                    ("Latency", "s", quantiles(SERVER, own)),
                ],
            ),
            (
                "Callers",
                vec![
                    (
                        "Requests by caller",
                        "reqps",
                        vec![(name, rate(peer, REQUESTS, inbound))],
                    ),
                    (
                        "Success rate by caller",
                        "percentunit",
                        vec![(name, success(peer, inbound))],
                    ),
                    ("p99 by caller", "s", p99(SERVER)),
                ],
            ),
            (
                "Outbound",
                vec![
                    (
                        "Requests by destination",
                        "reqps",
                        vec![(name, rate(peer, REQUESTS, outbound))],
                    ),
                    (
                        "Success rate by destination",
                        "percentunit",
                        vec![(name, success(peer, outbound))],
                    ),
                    ("p99 by destination", "s", p99(CLIENT)),
                ],
            ),
            (
                "gRPC",
                vec![
                    (
                        "Calls by status",
                        "reqps",
                        vec![(
                            "{{rpc_response_status_code}}",
                            rate(
                                "rpc_response_status_code",
                                REQUESTS,
                                &format!("{inbound},rpc_response_status_code!=\"\""),
                            ),
                        )],
                    ),
                    (
                        "Latency of the server",
                        "s",
                        quantiles("rpc_server_call_duration_seconds", own),
                    ),
                    (
                        "Latency of its clients' calls",
                        "s",
                        quantiles("rpc_client_call_duration_seconds", own),
                    ),
                ],
            ),
            (
                "Resilience",
                vec![
                    (
                        "Retries, ejections, rate limits",
                        "reqps",
                        vec![
                            count("retries", "", "retries"),
                            count("ejected: {{cause}}", "cause", "ejections"),
                            count("limited: {{policy}}", "policy", "rate_limited"),
                        ],
                    ),
                    (
                        "Connections",
                        "none",
                        vec![
                            (
                                "{{direction}}",
                                format!(
                                    "sum by (direction) (diy_mesh_proxy_connections_open{{{own}}})"
                                ),
                            ),
                            (
                                "open circuits",
                                format!("sum(diy_mesh_proxy_circuits_open{{{own}}})"),
                            ),
                        ],
                    ),
                    (
                        "Memory",
                        "bytes",
                        vec![(
                            "{{pod}}",
                            format!("diy_mesh_proxy_resident_memory_bytes{{{own}}}"),
                        )],
                    ),
                ],
            ),
        ],
    }
}

pub fn route() -> Dashboard {
    let route = "http_route=\"$route\"";
    let outbound = &format!("direction=\"outbound\",{route}");
    let (peer, name) = (
        "service_peer_namespace, service_peer_name",
        "{{service_peer_namespace}}/{{service_peer_name}}",
    );
    let by = |legend, by| vec![(legend, rate(by, REQUESTS, outbound))];
    Dashboard {
        name: "route",
        title: "Route",
        variables: &[(
            "route",
            "label_values(diy_mesh_proxy_requests_total{http_route!=\"\"}, http_route)",
        )],
        rows: vec![
            (
                "Backends",
                vec![
                    ("Requests by backend", "reqps", by(name, peer)),
                    (
                        "Success rate by backend",
                        "percentunit",
                        vec![(name, success(peer, outbound))],
                    ),
                    (
                        "p99 by backend",
                        "s",
                        vec![(name, quantile(0.99, peer, CLIENT, route))],
                    ),
                ],
            ),
            (
                "Results",
                vec![
                    (
                        "Responses by status",
                        "reqps",
                        by("{{http_response_status_code}}", "http_response_status_code"),
                    ),
                    (
                        "Errors",
                        "reqps",
                        vec![(
                            "{{error_type}}",
                            rate(
                                "error_type",
                                REQUESTS,
                                &format!("{outbound},error_type!=\"\""),
                            ),
                        )],
                    ),
                    (
                        "Requests by method",
                        "reqps",
                        by("{{http_request_method}}", "http_request_method"),
                    ),
                ],
            ),
            (
                "Callers",
                vec![
                    (
                        "Requests by caller",
                        "reqps",
                        by("{{namespace}}/{{workload}}", "namespace, workload"),
                    ),
                    (
                        "Success rate by caller",
                        "percentunit",
                        vec![(
                            "{{namespace}}/{{workload}}",
                            success("namespace, workload", outbound),
                        )],
                    ),
                    ("Latency", "s", quantiles(CLIENT, route)),
                ],
            ),
        ],
    }
}
