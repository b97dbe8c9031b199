//! `make soak`: mixed traffic for `MINUTES` (60), while pods, routes, policies and certificates
//! change. Nothing fails, no request reaches a pod that was removed more than a second before, and
//! the processes of the mesh need no more memory and descriptors at the end than before.

use std::collections::BTreeMap;
use std::env;
use std::thread;
use std::time::{Duration, Instant};

use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_sandbox::{Sandbox, View};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, http_server, shell, single_pod, under_load, with_controller,
};

use crate::differential::{CLIENT_ANNOTATIONS, changed_fields, server};

/// Lifetime of certificates in seconds: each proxy renews its own twice a minute.
const CERTIFICATE_LIFE: &str = "40";
/// Connections of one run of the differential test.
const CONNECTIONS: &str = "0..500";
/// The time from the removal of a pod until the last request to it, in 99 of 100 cases.
const MAX_REMOVAL: Duration = Duration::from_secs(1);
/// What the memory of a process may gain between the second and the last quarter of the time.
const MAX_GROWTH: f64 = 1.1;
const MAX_GROWTH_KB: f64 = 2048.0;
/// What the number of its descriptors may gain.
const MAX_DESCRIPTORS: f64 = 10.0;

/// Prints name, number, memory in KiB and descriptors of each process of the mesh.
const SAMPLE: &str = "for process in /proc/[0-9]*; do
    read -r name < $process/comm
    case $name in proxy | controller | injector)
        while read -r key value unit; do [[ $key = VmRSS: ]] && memory=$value; done < $process/status
        fds=($process/fd/*); echo $name ${process#/proc/} $memory ${#fds[@]} ;;
    esac
done 2> /dev/null; true";

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
    let objects = format!("{}{web}---{client}", server(1, &fields));
    let life = [("CERTIFICATE_LIFE", CERTIFICATE_LIFE)];
    let Some(sandbox) = with_controller(&life, &objects) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let (mut samples, mut removals, mut rounds) = (Samples::new(), Vec::new(), 0);
    under_load(&sandbox, &client, &[["1", "50"]], || {
        thread::scope(|scope| {
            let mixed = scope.spawn(|| mixed_traffic(&sandbox, &client, &fields, end));
            while Instant::now() < end {
                change(&sandbox, rounds);
                removals.extend(scale_down(&sandbox));
                sample(&sandbox, &client, &mut samples);
                rounds += 1;
            }
            println!(
                "{} exchanges are equal with and without the mesh",
                mixed.join().unwrap()
            );
        });
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
    let served = |view: &View, pod: &PodView| {
        let lines = view.lines(pod, "http-server").iter();
        lines.filter(|line| line.starts_with("Request #")).count()
    };
    let at_first = |pod: &PodView| (served(&sandbox.view(), pod), Duration::ZERO);
    let mut last: Vec<(usize, Duration)> = pods.iter().map(at_first).collect();
    let begun = Instant::now();
    sandbox.scale("servers", "http-server", 2).unwrap();
    let left = |view: &View| {
        for (pod, (count, at)) in pods.iter().zip(&mut last) {
            let now = served(view, pod);
            if now > *count {
                (*count, *at) = (now, begun.elapsed());
            }
        }
        let left = view.pods_of("servers", "http-server");
        (left.len() == 2).then_some(left)
    };
    let left = sandbox.wait("two pods to be removed", READY_TIMEOUT, left);
    let left = left.unwrap();
    let is_removed = |pod: &PodView| left.iter().all(|one| one.name != pod.name);
    let removed = pods.iter().zip(last).filter(|(pod, _)| is_removed(pod));
    removed.map(|(_, (_, at))| at).collect()
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
