//! Real clients and servers of protocols other than HTTP, in meshed pods: single connections, and
//! bursts of new ones.

use std::fs;
use std::path::PathBuf;

use diy_mesh_testkit::has_program;
use diy_mesh_testkit::skip;
use diy_mesh_tests::sandbox::{MESHED, run, shell, single_pod, with_mesh};

/// The number of new connections in a burst.
const BURST: usize = 300;

/// A meshed server in namespace `data` with a Service of its name, which runs this script.
fn server(name: &str, port: u16, script: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: data}}
spec: {{selector: {{app: {name}}}, ports: [{{port: {port}}}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: data}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}, annotations: {{{MESHED}}}}}
    spec:
      securityContext: {{runAsUser: 65534, runAsGroup: 65534}}
      containers:
        - name: {name}
          image: diy-sm-http-server:dev
          command: [bash, -c, \"{script}\"]
          startupProbe: {{tcpSocket: {{port: {port}}}, periodSeconds: 1, failureThreshold: 600}}
---"
    )
}

#[test]
fn redis_and_memcached_answer_each_new_connection() {
    if !has_program("redis-server") || !has_program("memcached") {
        return;
    }
    let redis = "exec redis-server --save '' --protected-mode no --dir /tmp";
    let objects = [
        server("redis", 6379, redis),
        server("memcached", 11211, "exec memcached -c 2048"),
        shell(MESHED),
    ];
    let Some(sandbox) = with_mesh(&objects.concat()) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let ping = "redis-cli -h redis.data ping; printf 'PING\\r\\n' | redis-cli -h redis.data";
    assert_eq!(run(&sandbox, &client, ping), "PONG\nPONG\n");
    let set = "exec 3<>/dev/tcp/memcached.data/11211; printf 'set a 0 0 5\\r\\nhello\\r\\nget a\\r\\nquit\\r\\n' >&3; cat <&3";
    let expected = "STORED\r\nVALUE a 0 5\r\nhello\r\nEND\r\n";
    assert_eq!(run(&sandbox, &client, set), expected);
    // Each request has a connection of its own.
    let burst = format!(
        "redis-benchmark -h redis.data -t ping_inline -n {BURST} -c 20 -k 0 -q; redis-cli -h redis.data info stats"
    );
    let output = run(&sandbox, &client, &burst);
    assert!(output.contains("requests per second"), "{output}");
    let received = output
        .lines()
        .find_map(|line| line.strip_prefix("total_connections_received:"));
    let received: usize = received.unwrap().trim().parse().unwrap();
    assert!(received > BURST, "{received} connections: {output}");
}

#[test]
fn postgresql_answers_each_new_connection() {
    let Some(programs) = postgresql() else {
        return;
    };
    let programs = programs.display();
    let start = format!(
        "export PATH=$PATH:{programs}; initdb -D /tmp/db -U postgres -A trust > /tmp/log \
         && echo host all all all trust >> /tmp/db/pg_hba.conf \
         && exec postgres -D /tmp/db -h '*' -k /tmp -c max_connections=400"
    );
    let objects = [server("postgres", 5432, &start), shell(MESHED)];
    let Some(sandbox) = with_mesh(&objects.concat()) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    // The client asks for TLS first, then sends its startup message.
    let query = "psql -h postgres.data -U postgres -Atc 'select 6 * 7'";
    assert_eq!(run(&sandbox, &client, query), "42\n");
    // pgbench opens a connection for each transaction.
    let burst = format!(
        "echo 'select 1;' > /tmp/query; {programs}/pgbench -h postgres.data -U postgres -n -C -f /tmp/query -c 30 -t {} postgres 2>&1",
        BURST / 30
    );
    let output = run(&sandbox, &client, &burst);
    let processed = format!("number of transactions actually processed: {BURST}/{BURST}");
    assert!(output.contains(&processed), "{output}");
}

/// The folder of PostgreSQL's programs. Debian's folder contains the version.
fn postgresql() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let mut folders = versions.filter_map(|version| Some(version.ok()?.path().join("bin")));
    let found = folders.find(|folder| folder.join("pgbench").exists());
    if found.is_none() {
        skip("postgresql is missing");
    }
    found
}
