//! Conversions of objects as Kubernetes writes them.

use super::*;
use crate::kinds::pod::ContainerPort;

fn read<T: for<'de> serde::Deserialize<'de>>(yaml: &str) -> T {
    serde_yaml_ng::from_str(yaml).expect("the test's YAML is right")
}

#[test]
fn dual_stack_service_keeps_both_cluster_ips_and_every_port() {
    let converted = service(&read(
        "metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.7
  clusterIPs: [10.96.0.7, 'fd00::7']
  ports:
  - {name: http, port: 80, targetPort: 8080, appProtocol: http}
  - {name: admin, port: 9000, targetPort: admin-port}
  - {name: dns, port: 53, protocol: UDP}",
    ))
    .unwrap();
    assert_eq!(
        converted.cluster_ips,
        [
            "10.96.0.7".parse::<IpAddr>().unwrap(),
            "fd00::7".parse().unwrap()
        ]
    );
    assert_eq!(converted.ports[0].target, TargetPort::Number(8080));
    assert_eq!(converted.ports[0].app_protocol, "http");
    assert_eq!(
        converted.ports[1].target,
        TargetPort::Name("admin-port".into())
    );
    assert_eq!(converted.ports[2].target, TargetPort::Number(53));
    assert_eq!(converted.ports[2].protocol, Transport::Udp);
}

#[test]
fn headless_and_external_services_have_no_cluster_ip() {
    let headless = service(&read(
        "{metadata: {name: db}, spec: {clusterIP: None, clusterIPs: [None]}}",
    ))
    .unwrap();
    assert!(headless.cluster_ips.is_empty());
    assert_eq!(headless.key, Key::new("default", "db"));
    let external = service(&read(
        "{metadata: {name: out}, spec: {type: ExternalName, externalName: example.org}}",
    ))
    .unwrap();
    assert!(external.cluster_ips.is_empty());
    assert_eq!(&*external.external_name, "example.org");
}

#[test]
fn invalid_canary_annotations_are_errors_of_the_canary_only() {
    let canary = |annotations: &str| {
        let yaml = format!("{{metadata: {{name: web-v2, annotations: {{{annotations}}}}}}}");
        service(&read(&yaml)).unwrap().canary
    };
    let error = |annotations: &str| canary(annotations).unwrap().content.unwrap_err().message;
    assert_eq!(canary("other: x"), None);
    let valid = canary("diy-service-mesh/canary-of: web, diy-service-mesh/canary-weight: '10'");
    let valid = valid.unwrap();
    assert_eq!((&*valid.parents[0].name, valid.content), ("web", Ok(10)));
    let name = "is not the name of a Service of the same namespace";
    let weight = "is not an integer from 0 to 100";
    for (of, percent, expected) in [
        ("web", "101", format!("canary-weight: \"101\" {weight}")),
        ("web", "-1", format!("canary-weight: \"-1\" {weight}")),
        ("web", "10%", format!("canary-weight: \"10%\" {weight}")),
        ("web", "", format!("canary-weight: \"\" {weight}")),
        ("far/web", "1", format!("canary-of: \"far/web\" {name}")),
        ("web.far", "1", format!("canary-of: \"web.far\" {name}")),
        ("", "1", format!("canary-of: \"\" {name}")),
    ] {
        let annotations = format!(
            "diy-service-mesh/canary-of: '{of}', diy-service-mesh/canary-weight: '{percent}'"
        );
        assert_eq!(error(&annotations), format!("diy-service-mesh/{expected}"));
    }
    let long = "a".repeat(200_000);
    for (of, percent) in [(&*long, "1"), ("web", &*long)] {
        let annotations = format!(
            "diy-service-mesh/canary-of: '{of}', diy-service-mesh/canary-weight: '{percent}'"
        );
        assert!(error(&annotations).len() < 256);
        assert!(canary(&annotations).unwrap().parents[0].name.len() <= 512);
    }
    let alone = error("diy-service-mesh/canary-weight: '1'");
    assert!(
        alone.starts_with("diy-service-mesh/canary-of: \"\""),
        "{alone}"
    );
}

#[test]
fn session_affinity_of_a_client_ip_has_a_timeout() {
    let timeout = |spec: &str| {
        let yaml = format!("{{metadata: {{name: web}}, spec: {{{spec}}}}}");
        service(&read(&yaml)).unwrap().session_affinity
    };
    let config = "sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}";
    assert_eq!(timeout("sessionAffinity: ClientIP"), 10_800);
    assert_eq!(timeout(&format!("sessionAffinity: ClientIP, {config}")), 60);
    assert_eq!(timeout(&format!("sessionAffinity: None, {config}")), 0);
}

#[test]
fn addresses_for_traffic_from_outside_are_those_that_kube_proxy_forwards_itself() {
    let balanced = |rest: &str| {
        service(&read(&format!(
            "metadata: {{name: web}}
spec: {{clusterIP: 10.96.0.7, externalIPs: [198.51.100.1], {rest}, externalTrafficPolicy: Local, ports: [{{port: 80, nodePort: 30080}}]}}
status: {{loadBalancer: {{ingress: [{{ip: 203.0.113.1}}, {{ip: 203.0.113.2, ipMode: VIP}}, {{ip: 203.0.113.3, ipMode: Proxy}}, {{hostname: lb.example.org}}]}}}}"
        )))
        .unwrap()
    };
    let texts = |service: &Service| {
        let ips = service.external_ips.iter();
        ips.map(ToString::to_string).collect::<Vec<_>>()
    };
    let web = balanced("type: LoadBalancer");
    assert_eq!(texts(&web), ["198.51.100.1", "203.0.113.1", "203.0.113.2"]);
    assert!(web.external_local && web.ports[0].node_port == Some(30080));
    let restricted = balanced("type: LoadBalancer, loadBalancerSourceRanges: [192.0.2.0/24]");
    assert_eq!(texts(&restricted), ["198.51.100.1"]);
    assert_eq!(texts(&balanced("type: NodePort")), ["198.51.100.1"]);
    assert!(texts(&balanced("type: ExternalName")).is_empty());
}

#[test]
fn node_may_have_made_a_pod_unready_whose_containers_and_gates_are_ready() {
    let unready_by_node = |ready, containers, gates: &str| {
        let yaml = format!(
            "metadata: {{name: web}}
spec: {{readinessGates: [{gates}]}}
status: {{conditions: [{{type: Ready, status: '{ready}'}}, {{type: ContainersReady, status: '{containers}'}}, {{type: a, status: 'True'}}, {{type: b, status: 'False'}}]}}"
        );
        pod(&read(&yaml), "cluster.local").unwrap().unready_by_node
    };
    assert!(unready_by_node("False", "True", ""));
    assert!(unready_by_node("False", "True", "{conditionType: a}"));
    for gates in [
        "{conditionType: a}, {conditionType: b}",
        "{conditionType: c}",
    ] {
        assert!(!unready_by_node("False", "True", gates), "{gates}");
    }
    assert!(!unready_by_node("True", "True", ""));
    assert!(!unready_by_node("False", "False", ""));
    let unready = |conditions: &str| {
        let yaml = format!("{{metadata: {{name: n}}, status: {{conditions: [{conditions}]}}}}");
        node(&read(&yaml)).unwrap().unready
    };
    assert!(unready("{type: Ready, status: Unknown}"));
    assert!(unready(
        "{type: DiskPressure, status: 'False'}, {type: Ready, status: 'False'}"
    ));
    assert!(!unready(
        "{type: Ready, status: 'True'}, {type: DiskPressure, status: 'False'}"
    ));
    assert!(!unready(""));
}

#[test]
fn missing_conditions_mean_ready_and_not_terminating() {
    let converted = slice(&read(
        "metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: everything}]
endpoints:
- addresses: [10.0.0.1, 10.0.0.2]
- {addresses: [10.0.0.3], conditions: {ready: false, terminating: true}, zone: a, targetRef: {kind: Pod, name: web-x}}",
    ))
    .unwrap();
    assert_eq!(converted.service, Some(Key::new("shop", "web")));
    assert_eq!(
        converted.ports,
        [SlicePort {
            name: "http".into(),
            port: 8080,
            protocol: Transport::Tcp
        }]
    );
    assert_eq!(
        converted.endpoints.len(),
        2,
        "addresses beyond an endpoint's first mean nothing"
    );
    assert!(converted.endpoints[0].ready && !converted.endpoints[0].terminating);
    assert!(converted.endpoints[0].serving && !converted.endpoints[1].serving);
    assert!(!converted.endpoints[1].ready && converted.endpoints[1].terminating);
    assert_eq!(
        converted.endpoints[1].pod.as_ref().unwrap().key,
        Key::new("shop", "web-x")
    );
}

#[test]
fn slice_of_names_has_no_endpoints() {
    let converted = slice(&read(
        "{metadata: {name: s}, addressType: FQDN, endpoints: [{addresses: [example.org]}]}",
    ))
    .unwrap();
    assert!(converted.endpoints.is_empty());
    assert_eq!(converted.service, None);
}

#[test]
fn injected_pod_has_the_identity_of_its_service_account() {
    let converted = pod(
        &read(
            "metadata: {name: p, namespace: shop}
spec: {serviceAccountName: clerk, containers: [], initContainers: [{name: proxy, env: [{name: SERVICE_MESH_TOKEN_FILE}]}]}
status: {phase: Running, podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}], conditions: [{type: Ready, status: 'True'}]}",
        ),
        "shop.example",
    )
    .unwrap();
    assert!(converted.ready);
    assert_eq!(
        converted.identity.as_deref(),
        Some("spiffe://shop.example/ns/shop/sa/clerk")
    );
    assert_eq!(converted.addresses.len(), 2);
}

#[test]
fn annotations_and_labels_do_not_make_a_pod_meshed() {
    let converted = pod(&read(
        "metadata: {name: p, namespace: shop, labels: {diy-service-mesh/status: injected}, annotations: {diy-service-mesh/status: injected}}
spec: {containers: [{name: proxy, env: [{name: SERVICE_MESH_TOKEN_FILE}]}]}",
    ), "cluster.local")
    .unwrap();
    assert_eq!(converted.identity, None);
}

#[test]
fn ports_that_do_not_pass_the_proxy_have_no_identity() {
    let converted = pod(&read(
        "metadata: {name: p, namespace: shop, annotations: {diy-service-mesh/skip-inbound-ports: '80'}}
spec:
  containers: [{name: app}]
  initContainers:
  - {name: proxy-init, args: ['--skip-inbound-ports=25,9000-9100']}
  - {name: proxy, args: [--admin-port=4001], env: [{name: SERVICE_MESH_TOKEN_FILE}]}",
    ), "cluster.local")
    .unwrap();
    for port in [25, 9000, 9100, 4001] {
        assert_eq!(converted.identity_at(port), None, "{port}");
    }
    for port in [26, 80, 8999, 9101, 4000] {
        assert_eq!(
            converted.identity_at(port).as_deref(),
            Some("spiffe://cluster.local/ns/shop/sa/default"),
            "{port}"
        );
    }
}

#[test]
fn reads_inbound_configuration_from_the_arguments_of_the_proxy_only() {
    let converted = pod(
        &read(
            "metadata: {name: p, namespace: shop, annotations: {diy-service-mesh/inbound: permissive, diy-service-mesh/opaque-ports: '80'}}
spec:
  containers: [{name: app, args: ['--opaque-ports=81', '--allow-connect'], ports: [{name: http, containerPort: 8080}, {containerPort: 53, protocol: UDP}]}]
  initContainers: [{name: other, args: ['--opaque-ports=82']}, {name: proxy, args: ['--inbound=strict', '--opaque-ports=25,9000-9100'], ports: [{containerPort: 4001}], env: [{name: SERVICE_MESH_TOKEN_FILE}]}]",
        ),
        "cluster.local",
    )
    .unwrap();
    let opaque: Vec<u16> = (1..=u16::MAX)
        .filter(|port| converted.is_opaque_at(*port))
        .collect();
    assert_eq!(opaque, [vec![25], (9000..=9100).collect()].concat());
    assert!(converted.inbound.strict && !converted.inbound.allow_connect);
    let port = |name: &str, port, protocol| ContainerPort {
        name: name.into(),
        port,
        protocol,
    };
    assert_eq!(
        *converted.inbound.ports,
        [
            port("http", 8080, Transport::Tcp),
            port("", 53, Transport::Udp)
        ]
    );
    let plain = pod(
        &read("{metadata: {name: p}, spec: {containers: [{name: proxy, args: ['--inbound=strict']}]}}"),
        "cluster.local",
    )
    .unwrap();
    assert_eq!(plain.inbound, Inbound::default());
}

#[test]
fn finished_and_host_network_pods_own_no_address() {
    for text in [
        "{metadata: {name: p}, spec: {containers: []}, status: {phase: Succeeded, podIP: 10.0.0.1}}",
        "{metadata: {name: p}, spec: {containers: []}, status: {phase: Failed, podIP: 10.0.0.1}}",
        "{metadata: {name: p}, spec: {hostNetwork: true, containers: []}, status: {phase: Running, podIP: 10.0.0.1}}",
    ] {
        let pod = pod(&read(text), "cluster.local").unwrap();
        assert!(pod.own_addresses().is_empty(), "{text}");
        assert_eq!(pod.addresses.is_empty(), !text.contains("hostNetwork"));
    }
}

#[test]
fn long_names_of_zones_are_unknown() {
    for (length, expected) in [(253, 253), (254, 0)] {
        let zone = "z".repeat(length);
        let text = format!(
            "{{metadata: {{name: s}}, addressType: IPv4, endpoints: [{{addresses: [10.0.0.1], zone: {zone}}}]}}"
        );
        let converted = slice(&read(&text)).unwrap();
        assert_eq!(converted.endpoints[0].zone.len(), expected);
    }
}

#[test]
fn errors_name_the_field_and_the_value() {
    let wrong_ip = service(&read("{metadata: {name: s}, spec: {clusterIP: 10.0.0}}")).unwrap_err();
    assert_eq!(
        wrong_ip.to_string(),
        "spec.clusterIPs: \"10.0.0\" is not an IP address"
    );
    let wrong_port = service(&read(
        "{metadata: {name: s}, spec: {ports: [{port: 70000}]}}",
    ))
    .unwrap_err();
    assert_eq!(
        wrong_port.to_string(),
        "spec.ports.port: 70000 is not a port (1 to 65535)"
    );
    let ports = vec!["{port: 1}"; 20_001].join(", ");
    let with =
        format!("{{metadata: {{name: s}}, addressType: IPv4, endpoints: [], ports: [{ports}]}}");
    let error = slice(&read(&with)).unwrap_err().to_string();
    assert_eq!(error, "ports: 20001 is not at most 20000 ports");
    assert_eq!(
        pod(&read("{metadata: {}}"), "cluster.local")
            .unwrap_err()
            .to_string(),
        "metadata.name is missing"
    );
}
