//! `make soak`: mixed traffic for `MINUTES` (60), while pods, routes, policies and certificates
//! change. Nothing fails, no stream or connection to a pod that stays is cut, no request reaches a
//! pod that was removed more than a second before, and the processes of the mesh need no more memory
//! and descriptors at the end than before.

use std::collections::BTreeMap;
use std::env;
use std::thread;
use std::time::{Duration, Instant};

use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_sandbox::{Sandbox, View};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, http_server, shell, single_pod, under_load, wait_for_line,
    with_controller,
};

use crate::differential::{CLIENT_ANNOTATIONS, changed_fields, server};

/// Lifetime of certificates in seconds: each proxy renews its own twice a minute.
const CERTIFICATE_LIFE: &str = "40";
/// Connections of one run of the differential test.
const CONNECTIONS: &str = "0..500";
/// The time from the removal of a pod until the last request to it, in 99 of 100 cases.
const MAX_REMOVAL: Duration = Duration::from_secs(1);
/// The maximum growth of the memory of a process between the second and the last quarter of the
/// time.
const MAX_GROWTH: f64 = 1.1;
const MAX_GROWTH_KB: f64 = 2048.0;
/// The maximum growth of the number of its descriptors.
const MAX_DESCRIPTORS: f64 = 10.0;

/// Prints name, number, memory in KiB and descriptors of each process of the mesh.
const SAMPLE: &str = "page=$(getconf PAGE_SIZE); for process in /proc/[0-9]*; do
    read -r name < $process/comm
    case $name in proxy | controller | injector)
        # A process that has ended has no memory.
        read -r size pages rest < $process/statm && ((pages)) || continue
        fds=($process/fd/*); echo $name ${process#/proc/} $((pages * page / 1024)) ${#fds[@]} ;;
    esac
done 2> /dev/null; true";

const GRPC_SERVER: &str = "image: diy-sm-grpc-server:dev
          env: [{name: LISTEN_PORT, value: '9000'}]
          startupProbe: {grpc: {port: 9000}, periodSeconds: 1, failureThreshold: 60}";
const GRPC_CLIENT: &str = "image: diy-sm-grpc-client:dev
          env: [{name: ENDPOINT, value: 'http://grpc-server.servers:9000'}, {name: INTERVAL_MS, value: '100'}]";
/// Sends a line with its name, then what it receives.
const ECHO: &str = "image: diy-sm-http-server:dev
          command: [sandbox-tcp-server, '9000', echo]
          startupProbe: {tcpSocket: {port: 9000}, periodSeconds: 1, failureThreshold: 60}";

/// A pod that stays, of a Service with port 9000.
fn app(name: &str, container: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: servers}}
spec: {{selector: {{app: {name}}}, ports: [{{name: app, port: 9000}}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: servers}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}, annotations: {{{MESHED}, diy-service-mesh/dump: 'off'}}}}
    spec:
      containers:
        - name: {name}
          {container}
"
    )
}

/// Memory and descriptors of the processes, by name and number, in order.
type Samples = BTreeMap<String, Vec<[f64; 2]>>;

#[test]
#[ignore = "takes an hour: make soak"]
fn nothing_fails_and_nothing_grows_while_everything_changes() {
    let minutes: u64 = env::var("MINUTES").map_or(60, |text| text.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(60 * minutes);
    let fields = changed_fields();
    let off = "diy-service-mesh/dump: 'off'";
    let root = "command: [sleep, infinity], securityContext: {runAsUser: 0, capabilities: {add: [SYS_PTRACE]}}";
    let client = shell(&format!("{MESHED}, {off}, {CLIENT_ANNOTATIONS}"))
        .replace("command: [sleep, infinity]", root);
    let web = http_server(4, "1.0", &format!("{MESHED}, {off}"));
    let servers = app("grpc-server", GRPC_SERVER) + &app("echo", ECHO);
    let objects = format!("{}{web}---{client}{servers}", server(1, &fields));
    let life = [("CERTIFICATE_LIFE", CERTIFICATE_LIFE)];
    let Some(sandbox) = with_controller(&life, &objects) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let calls = Calls::start(&sandbox);
    let (mut samples, mut removals, mut rounds) = (Samples::new(), Vec::new(), 0);
    under_load(&sandbox, &client, &[["1", "50"]], || {
        thread::scope(|scope| {
            let mixed = scope.spawn(|| mixed_traffic(&sandbox, &client, &fields, end));
            let echo = scope.spawn(|| echo_lines(&sandbox, &client, end));
            // Until the end, or until a thread has failed.
            while Instant::now() < end && !mixed.is_finished() && !echo.is_finished() {
                change(&sandbox, rounds);
                removals.extend(scale_down(&sandbox));
                sample(&sandbox, &client, &mut samples);
                rounds += 1;
            }
            println!(
                "{} exchanges are equal with and without the mesh, {} lines on one connection",
                mixed.join().unwrap(),
                echo.join().unwrap()
            );
        });
        calls.assert_none_failed();
    });
    removals.sort();
    let p99 = removals[removals.len() * 99 / 100];
    println!(
        "{rounds} rounds, {} removals, last request after {p99:?} (p99)",
        removals.len()
    );
    assert!(p99 < MAX_REMOVAL, "{removals:?}");
    assert_flat(&samples);
}

/// Compares exchanges of HTTP/1, HTTP/2 and opaque connections until the end. Returns their number.
fn mixed_traffic(sandbox: &Sandbox, client: &PodView, fields: &str, end: Instant) -> u64 {
    let mut exchanges = 0;
    while Instant::now() < end {
        let command = [
            "sandbox-differential",
            "compare",
            "1",
            fields,
            "server.servers",
            CONNECTIONS,
        ];
        let output = sandbox.exec(client, "shell", &command).unwrap();
        assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
        let count = output
            .stdout
            .split_whitespace()
            .find_map(|word| word.strip_prefix("exchanges="));
        exchanges += count.unwrap().parse::<u64>().unwrap();
    }
    exchanges
}

/// Sends lines to `echo` on one connection until the end. Returns their number.
fn echo_lines(sandbox: &Sandbox, client: &PodView, end: Instant) -> u64 {
    let seconds = (end - Instant::now()).as_secs();
    let script = format!(
        "trap '' PIPE
         exec 3<>/dev/tcp/echo.servers/9000 && read -r -t 20 name <&3
         for ((i = 0; SECONDS < {seconds}; i++)); do
             echo $i >&3 && read -r -t 20 line <&3 && [[ $line = $i ]] || exit 1
             sleep 0.1
         done
         echo $i"
    );
    let output = sandbox
        .exec(client, "shell", &["bash", "-c", &script])
        .unwrap();
    assert_eq!(output.code, 0, "the connection is cut: {output:?}");
    output.stdout.trim().parse().unwrap()
}

/// The calls and the stream of a gRPC client.
struct Calls<'a> {
    sandbox: &'a Sandbox,
    client: PodView,
    /// Failures before the first response on the stream.
    initial_failures: usize,
}

impl<'a> Calls<'a> {
    /// Starts the client, and waits until the stream is open.
    fn start(sandbox: &'a Sandbox) -> Self {
        sandbox.apply(&app("grpc-client", GRPC_CLIENT)).unwrap();
        sandbox.wait_settled(READY_TIMEOUT).unwrap();
        let client = single_pod(sandbox, "servers", "grpc-client");
        let opened = |line: &str| line.contains("Hello #1 of this stream");
        wait_for_line(sandbox, &client, "grpc-client", "a response", opened);
        let initial_failures = failures(&sandbox.view(), &client).count();
        Self {
            sandbox,
            client,
            initial_failures,
        }
    }

    fn assert_none_failed(&self) {
        let view = self.sandbox.view();
        let failures: Vec<_> = failures(&view, &self.client)
            .skip(self.initial_failures)
            .collect();
        assert!(failures.is_empty(), "{failures:#?}");
        let lines = view.lines(&self.client, "grpc-client").iter();
        let messages = lines.filter(|line| line.contains("Message: Hello #"));
        let (streamed, calls): (Vec<_>, Vec<_>) =
            messages.partition(|line| line.contains("of this stream"));
        println!(
            "{} gRPC calls, {} messages on one stream",
            calls.len(),
            streamed.len()
        );
    }
}

/// The calls that have failed, and the ends of streams.
fn failures<'a>(view: &'a View, client: &PodView) -> impl Iterator<Item = &'a String> {
    let lines = view.lines(client, "grpc-client").iter();
    lines.filter(|line| line.starts_with("Request failed"))
}

/// Changes routes and policies of the Service, and its number of pods.
fn change(sandbox: &Sandbox, round: usize) {
    let target = "targetRefs: [{group: '', kind: Service, name: http-server}]";
    let weight = round % 3 + 1;
    let objects = format!(
        "
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: http-server, namespace: servers}}
spec:
  parentRefs: [{{group: '', kind: Service, name: http-server}}]
  rules: [{{backendRefs: [{{name: http-server, port: 80, weight: {weight}}}]}}]
---
apiVersion: diy-service-mesh.dev/v1alpha1
kind: TrafficPolicy
metadata: {{name: http-server, namespace: servers}}
spec:
  {target}
  loadBalancing: {{algorithm: {}}}
---
apiVersion: diy-service-mesh.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: round-{}, namespace: servers}}
spec:
  targetRefs: [{{group: '', kind: Pod, selector: {{matchLabels: {{app: http-server}}}}}}]
  action: DENY
  rules: [{{networkAttributes: {{ports: [8080]}}, requests: [{{paths: [{{type: Exact, value: /denied-{round}}}]}}]}}]
",
        ["RoundRobin", "PeakEwma"][round % 2],
        round % 2,
    );
    sandbox.apply(&objects).unwrap();
    if round % 2 == 1 {
        sandbox
            .delete("HTTPRoute", "servers", "http-server")
            .unwrap();
        sandbox
            .delete("AuthorizationPolicy", "servers", "round-0")
            .unwrap();
    }
    sandbox.scale("servers", "http-server", 4).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
}

/// Removes two pods. Returns, for each, the time until its last request.
fn scale_down(sandbox: &Sandbox) -> Vec<Duration> {
    let pods = sandbox.view().pods_of("servers", "http-server");
    // The lines that were read, and the time of the last request. There are too many lines to read
    // all of them after each change.
    let at_first = |pod: &PodView| {
        let lines = sandbox.view().lines(pod, "http-server").len();
        (lines, Duration::ZERO)
    };
    let mut last: Vec<(usize, Duration)> = pods.iter().map(at_first).collect();
    let begun = Instant::now();
    sandbox.scale("servers", "http-server", 2).unwrap();
    let removed = |view: &View| {
        for (pod, (read, at)) in pods.iter().zip(&mut last) {
            let lines = &view.lines(pod, "http-server")[*read..];
            *read += lines.len();
            if lines.iter().any(|line| line.starts_with("Request #")) {
                *at = begun.elapsed();
            }
        }
        // A pod that is terminating still serves.
        let is_removed = |pod: &PodView| !view.pods.contains_key(&pod.full_name());
        let removed: Vec<bool> = pods.iter().map(is_removed).collect();
        (removed.iter().filter(|removed| **removed).count() == 2).then_some(removed)
    };
    let removed = sandbox.wait("two pods to be removed", READY_TIMEOUT, removed);
    let times = last.into_iter().zip(removed.unwrap());
    times
        .filter_map(|((_, at), removed)| removed.then_some(at))
        .collect()
}

fn sample(sandbox: &Sandbox, client: &PodView, samples: &mut Samples) {
    let output = sandbox
        .exec(client, "shell", &["bash", "-c", SAMPLE])
        .unwrap();
    for line in output.stdout.lines() {
        let [name, id, memory, descriptors] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("unexpected sample {line:?}: {output:?}");
        };
        let values = [memory, descriptors].map(|value| value.parse().unwrap());
        samples
            .entry(format!("{name} {id}"))
            .or_default()
            .push(values);
    }
}

/// Compares the second quarter of the samples of each process that was there all the time with the
/// last one.
fn assert_flat(samples: &Samples) {
    let longest = samples.values().map(Vec::len).max().unwrap();
    let mut grown = Vec::new();
    for (process, values) in samples.iter().filter(|(_, values)| values.len() == longest) {
        let quarter = values.len() / 4;
        let mean = |values: &[[f64; 2]], column: usize| {
            values.iter().map(|value| value[column]).sum::<f64>() / values.len() as f64
        };
        let [early, late] = [
            &values[quarter..2 * quarter],
            &values[values.len() - quarter..],
        ];
        let [memory, descriptors] = [0, 1].map(|column| [mean(early, column), mean(late, column)]);
        println!(
            "{process}: memory {:.0} to {:.0} KiB, descriptors {:.0} to {:.0}",
            memory[0], memory[1], descriptors[0], descriptors[1]
        );
        if memory[1] > memory[0] * MAX_GROWTH + MAX_GROWTH_KB
            || descriptors[1] > descriptors[0] + MAX_DESCRIPTORS
        {
            grown.push(process);
        }
    }
    assert!(grown.is_empty(), "grown: {grown:?}");
}
