//! Random valid exchanges in a sandbox, through the mesh and past it: what both ends receive is
//! equal, except for the fields that the reference names.

use std::env;

use diy_mesh_tests::differential::{DIRECT, MESH, TRANSCRIPTS};
use diy_mesh_tests::repository::{read, root};
use diy_mesh_tests::sandbox::{MESHED, shell, single_pod, with_mesh};

/// The numbers of the connections of a run without `DIFFERENTIAL_CONNECTIONS`. Half of them have
/// several exchanges.
const CONNECTIONS: &str = "0..3000";

/// The annotations of the pod of the client: the ports that bypass its proxy.
pub const CLIENT_ANNOTATIONS: &str = "diy-service-mesh/skip-outbound-ports: '9002-9004'";

/// A server in namespace `servers`, with ports that bypass its proxy.
pub fn server(seed: u64, omitted: &str) -> String {
    let ports: Vec<String> = (MESH..=TRANSCRIPTS)
        .map(|port| format!("{{name: p{port}, port: {port}}}"))
        .collect();
    let ports = ports.join(", ");
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: server, namespace: servers}}
spec: {{selector: {{app: server}}, ports: [{ports}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: server, namespace: servers}}
spec:
  selector: {{matchLabels: {{app: server}}}}
  template:
    metadata:
      labels: {{app: server}}
      annotations: {{{MESHED}, diy-service-mesh/dump: 'off', diy-service-mesh/skip-inbound-ports: '{DIRECT}-{TRANSCRIPTS}'}}
    spec:
      containers:
        - name: server
          image: diy-sm-http-server:dev
          command: [sandbox-differential, serve, '{seed}', '{omitted}']
          startupProbe: {{tcpSocket: {{port: {TRANSCRIPTS}}}, periodSeconds: 1, failureThreshold: 60}}
---"
    )
}

/// The first word of the second column of the table of changed fields, with each name in the first
/// one: `PART:NAME,...`.
pub fn changed_fields() -> String {
    let reference = read(&root().join("docs/reference/http.md"));
    let (_, table) = reference
        .split_once("| field | messages | change |\n")
        .unwrap();
    let rows = table
        .lines()
        .skip(1)
        .take_while(|line| line.starts_with('|'));
    let fields = rows.flat_map(|row| {
        let [_, names, messages, ..] = row.split('|').collect::<Vec<_>>()[..] else {
            panic!("{row} has fewer columns");
        };
        let part = messages.split_whitespace().next().unwrap();
        let names = names.split('`').skip(1).step_by(2);
        names.map(move |name| format!("{part}:{}", name.to_ascii_lowercase()))
    });
    fields.collect::<Vec<_>>().join(",")
}

#[test]
fn exchanges_are_equal_with_and_without_the_mesh() {
    let setting = |name: &str| env::var(name).ok();
    let connections = setting("DIFFERENTIAL_CONNECTIONS").unwrap_or(CONNECTIONS.to_owned());
    let seed = setting("DIFFERENTIAL_SEED").map(|seed| seed.parse().unwrap());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    println!("DIFFERENTIAL_SEED={seed} DIFFERENTIAL_CONNECTIONS={connections}");
    let omitted = changed_fields();
    assert!(omitted.contains("x-called-by"), "{omitted}");
    let client = shell(&format!(
        "{MESHED}, diy-service-mesh/dump: 'off', {CLIENT_ANNOTATIONS}"
    ));
    let Some(sandbox) = with_mesh(&format!("{}{client}", server(seed, &omitted))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let seed = seed.to_string();
    let command = [
        "sandbox-differential",
        "compare",
        &seed,
        &omitted,
        "server.servers",
        &connections,
    ];
    let output = sandbox.exec(&client, "shell", &command).unwrap();
    println!("{}", output.stdout);
    assert_eq!(
        output.code, 0,
        "the differences are above: {}",
        output.stderr
    );
}
