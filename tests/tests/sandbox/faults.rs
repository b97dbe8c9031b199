//! Faults of networks and processes under load in one sandbox, one after the other, in half of the
//! pods of a Service. No request fails, and afterwards all pods serve again.

use std::env;

use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_sandbox::{Sandbox, View};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, http_server, script, shell, single_pod, under_load, with_mesh,
};

/// The number of pods of the Service.
const PODS: u32 = 4;

/// A fault, as scripts that run in a container of a pod: as root, or as the user of its proxy.
struct Case {
    fault: &'static str,
    /// The container in which the scripts run.
    container: &'static str,
    begin: &'static str,
    /// Succeeds as soon as the fault has had an effect.
    effect: &'static str,
    end: &'static str,
}

const CASES: [Case; 6] = [
    Case {
        fault: "packets are delayed and overtake each other, in both directions",
        container: "faults",
        begin: "delay",
        effect: "(($(wc -l < /tmp/overtaken) >= 20))",
        end: "iptables -F && kill $(< /tmp/delay)",
    },
    Case {
        fault: "one packet of ten is lost, in both directions",
        container: "faults",
        begin: "drop 'numgen random mod 100 < 10 counter drop'",
        effect: "counted 20",
        end: "nft delete table inet fault",
    },
    Case {
        fault: "no packet arrives",
        container: "faults",
        begin: "drop 'counter drop'",
        effect: "counted 5",
        end: "nft delete table inet fault",
    },
    Case {
        fault: "connections are reset",
        container: "faults",
        begin: "drop 'counter reject with tcp reset'",
        effect: "counted 2",
        end: "nft delete table inet fault",
    },
    Case {
        fault: "the proxy is killed at random moments, also while it starts",
        container: "faults",
        begin: "kill_often",
        effect: "find_proxy && [[ $pid != $(< /tmp/killed) ]]",
        end: "find_proxy",
    },
    // The probes of the pod need descriptors, too: it is not ready while it has none.
    Case {
        fault: "the proxy has no file descriptor left",
        container: "proxy",
        begin: "find_proxy && prlimit --pid $pid --nofile=8:",
        effect: "find_proxy && refused",
        end: "find_proxy && prlimit --pid $pid --nofile=$(prlimit --pid $pid --nofile --output HARD --noheadings):",
    },
];

/// Functions of the scripts. The packets of the local application are on the loopback interface.
/// Processes of all pods are visible: the network namespace identifies the processes of the pod.
const FUNCTIONS: &str = r#"
drop() {
    nft "table inet fault {
        chain in { type filter hook input priority 0; iifname != \"lo\" meta l4proto tcp ct original proto-dst 8080 $1; }
        chain out { type filter hook output priority 0; oifname != \"lo\" meta l4proto tcp ct original proto-dst 8080 ${1/reject with tcp reset/accept}; }
    }"
}
delay() {
    setsid sandbox-delay 1 50 > /tmp/overtaken 2>&1 &
    echo $! > /tmp/delay
    # It outlives this command once it has a session of its own.
    until [[ $(< /proc/$!/comm) = sandbox-delay ]]; do sleep 0.01; done
    iptables -A INPUT ! -i lo -p tcp -j NFQUEUE --queue-num 1 --queue-bypass &&
    iptables -A OUTPUT ! -o lo -p tcp -j NFQUEUE --queue-num 1 --queue-bypass
}
counted() {
    [[ $(nft list chain inet fault in) =~ packets\ ([0-9]+) ]] && ((BASH_REMATCH[1] >= $1))
}
refused() {
    ! timeout 1 bash -c 'exec 3<>/dev/tcp/$0/4001; printf "GET /ready HTTP/1.0\r\n\r\n" >&3; read -r line <&3' $(hostname -i)
}
find_proxy() {
    for process in /proc/[0-9]*; do
        read -r name < $process/comm && [[ $name = proxy && $process/ns/net -ef /proc/self/ns/net ]] && pid=${process#/proc/} && return
    done 2> /dev/null
    return 1
}
kill_often() {
    for kills in 1 2 3 4 5; do
        until find_proxy && [[ $pid != $killed ]]; do sleep 0.01; done
        sleep 0.$((100 + RANDOM % 900))
        kill -9 $pid && killed=$pid || return 1
    done
    echo $killed > /tmp/killed
}
"#;

/// Limits for one attempt of a request, and three more.
pub const ROUTE: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: http-server, namespace: servers}
spec:
  parentRefs: [{group: '', kind: Service, name: http-server}]
  rules:
    - backendRefs: [{name: http-server, port: 80}]
      timeouts: {backendRequest: 1s}
      retry: {attempts: 3, codes: [502, 503, 504], backoff: 10ms}
---";

/// The container of root.
const CONTAINER: &str = "      containers:
        - name: faults
          image: diy-sm-http-server:dev
          command: [sleep, infinity]
          securityContext: {runAsUser: 0, capabilities: {add: [NET_ADMIN, SYS_PTRACE]}}
";

fn run(sandbox: &Sandbox, pod: &PodView, case: &Case, text: &str) {
    let random = fastrand::u16(..);
    let whole = format!("RANDOM={random}{FUNCTIONS}{text}");
    let output = script(sandbox, pod, case.container, &whole);
    assert_eq!(output.code, 0, "{text}: {output:?}");
}

/// The numbers of requests that the pods have served.
fn served(view: &View, pods: &[PodView]) -> Vec<usize> {
    let requests = |pod: &PodView| {
        let lines = view.lines(pod, "http-server").iter();
        lines.filter(|line| line.starts_with("Request #")).count()
    };
    pods.iter().map(requests).collect()
}

/// Waits until all pods of the Service have served more requests.
pub fn assert_all_serve(sandbox: &Sandbox, after: &str) {
    let pods = sandbox.view().pods_of("servers", "http-server");
    let before = served(&sandbox.view(), &pods);
    let all_serve = |view: &View| {
        let now = served(view, &pods);
        let serve = now.iter().zip(&before).all(|(now, before)| now > before);
        serve.then_some(())
    };
    let healed = format!("all pods serve after: {after}");
    sandbox.wait(&healed, READY_TIMEOUT, all_serve).unwrap();
}

#[test]
fn faults_of_half_of_the_endpoints_fail_no_request_and_heal() {
    let server = http_server(PODS, "1.0", MESHED).replace("      containers:\n", CONTAINER);
    let Some(sandbox) = with_mesh(&format!("{ROUTE}{server}---{}", shell(MESHED))) else {
        return;
    };
    let seed = env::var("FAULTS_SEED").map_or(fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("FAULTS_SEED={seed}");
    fastrand::seed(seed);
    let client = single_pod(&sandbox, "clients", "shell");
    let pods = sandbox.view().pods_of("servers", "http-server");
    let half = &pods[..pods.len() / 2];
    under_load(&sandbox, &client, &[["4", "50"]], || {
        for case in &CASES {
            println!("{}", case.fault);
            for pod in half {
                run(&sandbox, pod, case, case.begin);
            }
            for pod in half {
                let until = format!("until {}; do sleep 0.1; done", case.effect);
                run(&sandbox, pod, case, &until);
            }
            for pod in half {
                run(&sandbox, pod, case, case.end);
            }
            sandbox.wait_settled(READY_TIMEOUT).unwrap();
            assert_all_serve(&sandbox, case.fault);
        }
    });
}
