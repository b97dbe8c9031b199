//! The sandbox without the mesh: Services, containers, restarts, errors.

use std::time::Duration;

use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, empty, get, http_server, script, shell, single_pod,
};

#[test]
fn service_resolves_by_all_names_and_balances() {
    let Some(sandbox) = empty() else { return };
    sandbox.apply(&http_server(2, "1.0", "")).unwrap();
    sandbox.apply(&shell("")).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let shell = single_pod(&sandbox, "clients", "shell");
    for name in [
        "http-server.servers.svc.cluster.local",
        "http-server.servers.svc.cluster.local.",
        "http-server.servers.svc",
        "http-server.servers",
    ] {
        let response = get(&sandbox, &shell, name, 80);
        assert!(
            response.contains("Hello from the http-server service!"),
            "{name}: {response}"
        );
    }
    let late = "{apiVersion: v1, kind: Service, metadata: {name: late, namespace: clients}, spec: {clusterIP: None, ports: [{port: 8080}]}}";
    let slice = "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: late, namespace: clients, labels: {kubernetes.io/service-name: late}}";
    let address = sandbox.view().pods_of("servers", "http-server")[0]
        .ip
        .clone()
        .unwrap();
    sandbox
        .apply(&format!("{late}\n---\n{slice}, addressType: IPv4, ports: [{{port: 8080}}], endpoints: [{{addresses: [{address}]}}]}}"))
        .unwrap();
    // A headless Service without selector resolves by its short name in a running pod.
    get(&sandbox, &shell, "late", 8080);
    let mut hosts = std::collections::BTreeSet::new();
    // Random balancing: 100 requests miss one of two pods with probability 10^-29.
    for _ in 0..100 {
        let response = get(&sandbox, &shell, "http-server.servers", 80);
        hosts.extend(
            response
                .split("Hostname: ")
                .nth(1)
                .and_then(|rest| rest.split(' ').next())
                .map(str::to_owned),
        );
        if hosts.len() == 2 {
            return;
        }
    }
    panic!("responses only from {hosts:?}");
}

#[test]
fn object_of_an_unknown_kind_is_ignored_with_a_notice() {
    let Some(sandbox) = empty() else { return };
    let typo = "{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRout, metadata: {name: web, namespace: a}}";
    sandbox.apply(typo).unwrap();
    assert_eq!(
        sandbox.view().notices,
        [
            "ignored HTTPRout of gateway.networking.k8s.io/v1, a/web: the sandbox does not have this kind"
        ]
    );
}

#[test]
fn pod_that_asks_for_a_proxy_without_a_mesh_is_named_in_a_notice() {
    let Some(sandbox) = empty() else { return };
    sandbox.apply(&shell(MESHED)).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let notices = sandbox.view().notices.clone();
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(notices[0].contains(" has no proxy: "), "{notices:?}");
}

#[test]
fn service_without_endpoints_refuses_connections() {
    let Some(sandbox) = empty() else { return };
    sandbox.apply(&http_server(0, "1.0", "")).unwrap();
    sandbox.apply(&shell("")).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let shell = single_pod(&sandbox, "clients", "shell");
    let connect = ["bash", "-c", "exec 3<>/dev/tcp/http-server.servers/80"];
    let refused = sandbox.exec(&shell, "shell", &connect).unwrap();
    assert!(
        refused.code != 0 && refused.stderr.contains("Connection refused"),
        "{refused:?}"
    );

    sandbox.scale("servers", "http-server", 1).unwrap();
    sandbox
        .wait("the server is ready", READY_TIMEOUT, |view| {
            view.pods_of("servers", "http-server")
                .iter()
                .any(|pod| pod.ready)
                .then_some(())
        })
        .unwrap();
    // Rules are updated shortly after readiness.
    let connect =
        "until exec 3<>/dev/tcp/http-server.servers/80; do read -t 0.05 <> <(:); done 2>/dev/null";
    assert_eq!(script(&sandbox, &shell, "shell", connect).code, 0);
}

#[test]
fn dual_stack_service_has_both_addresses() {
    let Some(sandbox) = empty() else { return };
    sandbox
        .apply(&http_server(1, "1.0", "").replace(
            "spec: {selector:",
            "spec: {ipFamilyPolicy: PreferDualStack, selector:",
        ))
        .unwrap();
    sandbox.apply(&shell("")).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let shell = single_pod(&sandbox, "clients", "shell");
    let hosts = sandbox
        .exec(
            &shell,
            "shell",
            &["grep", "http-server.servers.svc", "/etc/hosts"],
        )
        .unwrap()
        .stdout;
    let addresses: Vec<&str> = hosts
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    let ipv6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
    assert_eq!(addresses.len(), 1 + usize::from(ipv6), "{hosts}");
    for address in addresses {
        get(&sandbox, &shell, address, 80);
    }
}

#[test]
fn container_has_user_capabilities_and_volumes() {
    let Some(sandbox) = empty() else { return };
    sandbox
        .apply(
            "
apiVersion: v1
kind: Pod
metadata: {name: box, namespace: a}
spec:
  serviceAccountName: keeper
  securityContext: {runAsUser: 1337, runAsGroup: 1338}
  terminationGracePeriodSeconds: 1
  containers:
    - name: box
      image: diy-sm-http-client:dev
      command: [sleep, infinity]
      env: [{name: OWN, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}]
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      volumeMounts:
        - {name: token, mountPath: /var/run/secrets/diy-service-mesh}
        - {name: scratch, mountPath: /tmp/scratch}
    - name: admin
      image: diy-sm-proxy-init:dev
      command: [sleep, infinity]
      securityContext: {runAsUser: 0, capabilities: {drop: [ALL], add: [NET_ADMIN, NET_RAW]}}
      volumeMounts: [{name: scratch, mountPath: /tmp/scratch}]
  volumes:
    - {name: scratch, emptyDir: {}}
    - name: token
      projected: {sources: [{serviceAccountToken: {audience: diy-service-mesh, expirationSeconds: 3600, path: token}}]}
",
        )
        .unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let pod = single_pod(&sandbox, "a", "box");
    let run = |container: &str, script: &str| {
        let output = sandbox
            .exec(&pod, container, &["bash", "-c", script])
            .unwrap();
        assert_eq!(output.code, 0, "{script}: {}", output.stderr);
        output.stdout.trim().to_owned()
    };
    assert_eq!(
        run("box", "id -u; id -g; id -G; hostname; echo $OWN"),
        "1337\n1338\n1338\nbox\na"
    );
    assert_eq!(
        run(
            "box",
            "grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status | cut -f 2"
        ),
        "0000000000000000\n0000000000000000\n1"
    );
    // NET_ADMIN is bit 12, NET_RAW bit 13.
    assert_eq!(
        run("admin", "id -u; grep CapEff /proc/self/status | cut -f 2"),
        "0\n0000000000003000"
    );
    assert_eq!(
        run(
            "box",
            "tr . '\\n' < /var/run/secrets/diy-service-mesh/token | wc -l"
        ),
        "2"
    );
    run(
        "box",
        "echo shared > /tmp/scratch/file; echo own > /tmp/file",
    );
    assert_eq!(
        run("admin", "cat /tmp/scratch/file; ls /tmp"),
        "shared\nscratch"
    );
    assert_eq!(
        run("admin", "touch /no-such-file 2>&1 || echo read-only"),
        "touch: cannot touch '/no-such-file': Read-only file system\nread-only"
    );
    assert_eq!(
        run(
            "box",
            "ls /sys/class/net 2>/dev/null >/dev/null; grep -c : /proc/self/net/dev"
        ),
        "2",
        "lo and eth0"
    );
}

#[test]
fn container_restarts_after_exit() {
    let Some(sandbox) = empty() else { return };
    sandbox
        .apply(
            "
apiVersion: v1
kind: Pod
metadata: {name: unsteady, namespace: a}
spec:
  containers: [{name: unsteady, image: diy-sm-http-client:dev, command: [bash, -c, 'echo begun; exit 3']}]
",
        )
        .unwrap();
    let pod = sandbox
        .wait("a restart", READY_TIMEOUT, |view| {
            view.pods.values().find(|pod| pod.restarts() >= 1).cloned()
        })
        .unwrap();
    assert_eq!(pod.containers[0].exit_code, Some(3));
    sandbox
        .wait("its second line", READY_TIMEOUT, |view| {
            (view.lines(&pod, "unsteady").len() >= 2).then_some(())
        })
        .unwrap();
}

#[test]
fn unknown_image_is_reported() {
    let Some(sandbox) = empty() else { return };
    sandbox
        .apply("{apiVersion: v1, kind: Pod, metadata: {name: web, namespace: a}, spec: {containers: [{name: web, image: 'nginx:1'}]}}")
        .unwrap();
    let reason = sandbox
        .wait("the reason", READY_TIMEOUT, |view| {
            view.pods.get("a/web").and_then(|pod| pod.reason.clone())
        })
        .unwrap();
    assert!(
        reason.contains("nginx:1") && reason.contains("diy-sm-NAME"),
        "{reason}"
    );
}

#[test]
fn kills_program_that_ignores_sigterm() {
    let Some(sandbox) = empty() else { return };
    sandbox
        .apply(
            "
apiVersion: v1
kind: Pod
metadata: {name: stubborn, namespace: a}
spec:
  terminationGracePeriodSeconds: 5
  containers: [{name: stubborn, image: diy-sm-http-client:dev, command: [bash, -c, \"trap 'echo heard' TERM; echo up; while :; do sleep 0.1; done\"]}]
",
        )
        .unwrap();
    let pod = sandbox
        .wait("the first line", READY_TIMEOUT, |view| {
            view.pods
                .values()
                .find(|pod| !view.lines(pod, "stubborn").is_empty())
                .cloned()
        })
        .unwrap();
    sandbox.delete("Pod", "a", "stubborn").unwrap();
    sandbox
        .wait("the deletion", READY_TIMEOUT, |view| {
            view.pods.is_empty().then_some(())
        })
        .unwrap();
    assert_eq!(sandbox.view().lines(&pod, "stubborn"), ["up", "heard"]);
    sandbox.shut_down(Duration::from_secs(1)).unwrap();
}
