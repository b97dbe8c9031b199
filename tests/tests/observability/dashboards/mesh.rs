//! The dashboards of the whole mesh and of the control plane.

use super::panels::{
    DENIED, Dashboard, REQUESTS, SERVER, mutual_tls, quantile, quantiles, rate, success,
};

pub fn mesh() -> Dashboard {
    let (inbound, by) = ("direction=\"inbound\"", "namespace");
    let failures = "diy_mesh_proxy_failures_total";
    Dashboard {
        name: "mesh",
        title: "Mesh",
        variables: &[],
        rows: vec![
            (
                "Requests",
                vec![
                    (
                        "Requests",
                        "reqps",
                        vec![("{{namespace}}", rate(by, REQUESTS, inbound))],
                    ),
                    (
                        "Success rate",
                        "percentunit",
                        vec![("{{namespace}}", success(by, inbound))],
                    ),
                    ("Latency", "s", quantiles(SERVER, "")),
                ],
            ),
            (
                "Security",
                vec![
                    (
                        "Requests with mutual TLS",
                        "percentunit",
                        vec![("share", mutual_tls(inbound))],
                    ),
                    (
                        "Denied calls",
                        "reqps",
                        vec![("{{namespace}}", rate(by, failures, DENIED))],
                    ),
                    (
                        "Time until the first certificate expires",
                        "s",
                        vec![(
                            "",
                            "min(diy_mesh_proxy_certificate_end_time_seconds) - time()".into(),
                        )],
                    ),
                ],
            ),
            (
                "Proxies",
                vec![
                    (
                        "Proxies",
                        "none",
                        vec![
                            ("all", "count(diy_mesh_proxy_discovery_connected)".into()),
                            (
                                "connected",
                                "sum(diy_mesh_proxy_discovery_connected)".into(),
                            ),
                        ],
                    ),
                    (
                        "Failures",
                        "reqps",
                        vec![(
                            "{{code}}",
                            format!("topk(10, {})", rate("code", failures, "")),
                        )],
                    ),
                    (
                        "Memory",
                        "bytes",
                        vec![(
                            "largest",
                            "max(diy_mesh_proxy_resident_memory_bytes)".into(),
                        )],
                    ),
                ],
            ),
        ],
    }
}

pub fn control_plane() -> Dashboard {
    let name = |metric: &str| format!("diy_mesh_controller_{metric}");
    let p99 = |metric| vec![("{{pod}}", quantile(0.99, "pod", metric, ""))];
    let count = |legend, by, metric| vec![(legend, rate(by, metric, ""))];
    let max =
        |legend, by: &str, metric| vec![(legend, format!("max by ({by}) ({})", name(metric)))];
    Dashboard {
        name: "control-plane",
        title: "Control plane",
        variables: &[],
        rows: vec![
            (
                "Discovery",
                vec![
                    (
                        "Ready controllers, open streams",
                        "none",
                        vec![
                            ("ready", format!("sum({})", name("ready"))),
                            ("{{pod}} {{rpc}}", name("streams")),
                        ],
                    ),
                    (
                        "p99 of publications",
                        "s",
                        p99("diy_mesh_controller_publication_duration_seconds"),
                    ),
                    (
                        "Updates",
                        "cps",
                        count("{{kind}}", "kind", "diy_mesh_controller_updates_total"),
                    ),
                ],
            ),
            (
                "Catalog",
                vec![
                    (
                        "Age of watches",
                        "s",
                        max("{{kind}}", "kind", "watch_age_seconds"),
                    ),
                    (
                        "Queues",
                        "none",
                        vec![
                            ("{{of}}", format!("max by (of) ({})", name("queued"))),
                            (
                                "statuses",
                                format!("max({})", name("route_status_writes_waiting")),
                            ),
                        ],
                    ),
                    (
                        "p99 of lock holds",
                        "s",
                        vec![(
                            "{{lock}}",
                            quantile(0.99, "lock", "diy_mesh_controller_lock_hold_seconds", ""),
                        )],
                    ),
                ],
            ),
            (
                "Certificates and tokens",
                vec![
                    (
                        "Certificate requests",
                        "cps",
                        count(
                            "{{result}}",
                            "result",
                            "diy_mesh_controller_certificates_total",
                        ),
                    ),
                    (
                        "p99 of certificate requests",
                        "s",
                        p99("diy_mesh_controller_signing_duration_seconds"),
                    ),
                    (
                        "p99 of token reviews",
                        "s",
                        p99("diy_mesh_controller_token_review_duration_seconds"),
                    ),
                ],
            ),
            (
                "Injector",
                vec![
                    (
                        "Reviews",
                        "cps",
                        count("{{outcome}}", "outcome", "diy_mesh_injector_reviews_total"),
                    ),
                    (
                        "p99 of reviews",
                        "s",
                        p99("diy_mesh_injector_review_duration_seconds"),
                    ),
                    (
                        "Memory",
                        "bytes",
                        vec![
                            ("{{pod}}", name("resident_memory_bytes")),
                            ("{{pod}}", "diy_mesh_injector_resident_memory_bytes".into()),
                        ],
                    ),
                ],
            ),
        ],
    }
}
