//! Helpers for tests in a sandbox: start, manifests, requests, log assertions. Tests are skipped on
//! machines that cannot run a sandbox, except in CI, where they fail.

use std::{
    env,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use diy_mesh_sandbox::{
    Error, Sandbox, View, manifest,
    protocol::{Output, PodView},
};
use diy_mesh_testkit::skip;
use diy_mesh_testkit::wait::TEST_TIMEOUT;
use serde_json::{Value, json};

/// Limit for each wait, and for each script.
pub const READY_TIMEOUT: Duration = TEST_TIMEOUT;

/// The exit code of timeout(1) when the time is up.
const TIMEOUT_CODE: i32 = 124;

/// The programs of a release, which a sandbox needs.
pub const PROGRAMS: [&str; 9] = [
    "mesh",
    "controller",
    "injector",
    "proxy",
    "proxy-init",
    "http-client",
    "http-server",
    "grpc-client",
    "grpc-server",
];

/// Starts an empty sandbox. Returns `None` on a machine that cannot run one.
pub fn empty() -> Option<Sandbox> {
    empty_with(&programs())
}

/// Like [`empty`], with the programs of this directory.
pub fn empty_with(programs: &Path) -> Option<Sandbox> {
    match Sandbox::start(programs) {
        Ok(sandbox) => Some(sandbox),
        Err(Error::Launch(reason)) => {
            skip(reason);
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Starts a sandbox with the real control plane and further objects, and waits until all pods are
/// ready.
pub fn with_mesh(yaml: &str) -> Option<Sandbox> {
    with_controller(&[], yaml)
}

/// Like [`with_mesh`], with additional environment variables of the controller.
pub fn with_controller(env: &[(&str, &str)], yaml: &str) -> Option<Sandbox> {
    let sandbox = empty()?;
    install(&sandbox, |controller| set_env(controller, env), yaml);
    Some(sandbox)
}

/// Adds environment variables to a container.
pub fn set_env(container: &mut Value, env: &[(&str, &str)]) {
    let variables = container["env"].as_array_mut();
    let variables = variables.expect("the container has variables");
    let env = env.iter();
    variables.extend(env.map(|(name, value)| json!({"name": name, "value": value})));
}

/// Starts the control plane and further objects in an empty sandbox, and waits until all pods are
/// ready. `change` changes the container of the controller.
pub fn install(sandbox: &Sandbox, change: impl FnOnce(&mut Value), yaml: &str) {
    let mut objects = manifest::embedded()
        .objects()
        .expect("the embedded manifests are valid");
    let sample_apps = ["http-client", "http-server", "grpc-client", "grpc-server"];
    objects.retain(|object| {
        !sample_apps
            .iter()
            .any(|&name| object["metadata"]["namespace"] == name)
    });
    let is_controller = |object: &&mut Value| {
        object["kind"] == "Deployment" && object["metadata"]["name"] == "controller"
    };
    let controller = objects.iter_mut().find(is_controller);
    let controller = controller.expect("the manifests have a controller");
    change(&mut controller["spec"]["template"]["spec"]["containers"][0]);
    sandbox.apply_objects(objects).expect("the mesh is applied");
    // Proxies that start before the controller is ready log warnings.
    sandbox
        .wait_settled(READY_TIMEOUT)
        .expect("the mesh gets ready");
    sandbox.apply(yaml).expect("the test's objects are applied");
    sandbox
        .wait_settled(READY_TIMEOUT)
        .expect("everything gets ready");
}

/// Starts a sandbox with the walkthrough and waits until all pods are ready.
pub fn walkthrough() -> Option<Sandbox> {
    let sandbox = empty()?;
    sandbox
        .apply_objects(
            manifest::embedded()
                .objects()
                .expect("the embedded manifests are valid"),
        )
        .expect("the walkthrough is applied");
    sandbox
        .wait_settled(READY_TIMEOUT)
        .expect("everything gets ready");
    Some(sandbox)
}

/// Directory of the programs of this workspace.
pub fn programs() -> PathBuf {
    let own = env::current_exe().expect("a test knows its own path");
    let folder = own
        .parent()
        .and_then(Path::parent)
        .expect("the test binary is in target/PROFILE/deps")
        .to_owned();
    for program in PROGRAMS {
        assert!(
            folder.join(program).is_file(),
            "{program} is not in {}: run `cargo build --bins` first",
            folder.display()
        );
    }
    folder
}

/// Deployment and Service of http-server in namespace `servers`.
pub fn http_server(replicas: u32, version: &str, annotations: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: http-server, namespace: servers}}
spec: {{selector: {{app: http-server}}, ports: [{{name: http, port: 80, targetPort: http}}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: http-server, namespace: servers}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: http-server}}}}
  template:
    metadata: {{labels: {{app: http-server}}, annotations: {{{annotations}}}}}
    spec:
      containers:
        - name: http-server
          image: diy-sm-http-server:dev
          env:
            - {{name: HOSTNAME, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}
            - {{name: VERSION, value: '{version}'}}
          ports: [{{name: http, containerPort: 8080}}]
          readinessProbe: {{tcpSocket: {{port: http}}, periodSeconds: 1}}
          lifecycle: {{preStop: {{sleep: {{seconds: 2}}}}}}
"
    )
}

/// Deployment of an idle container in namespace `clients`, in which tests run commands.
pub fn shell(annotations: &str) -> String {
    format!(
        "
apiVersion: apps/v1
kind: Deployment
metadata: {{name: shell, namespace: clients}}
spec:
  selector: {{matchLabels: {{app: shell}}}}
  template:
    metadata: {{labels: {{app: shell}}, annotations: {{{annotations}}}}}
    spec:
      containers: [{{name: shell, image: diy-sm-http-client:dev, command: [sleep, infinity]}}]
      terminationGracePeriodSeconds: 1
"
    )
}

/// Annotation that enables injection.
pub const MESHED: &str = "diy-service-mesh/inject: 'true'";

/// Returns the only pod of a workload.
pub fn single_pod(sandbox: &Sandbox, namespace: &str, workload: &str) -> PodView {
    let pods = sandbox.view().pods_of(namespace, workload);
    assert_eq!(pods.len(), 1, "pods of {namespace}/{workload}");
    pods.into_iter().next().expect("there is one")
}

/// Waits for a log line that matches, and returns it.
pub fn wait_for_line(
    sandbox: &Sandbox,
    pod: &PodView,
    container: &str,
    what: &str,
    matches: impl Fn(&str) -> bool,
) -> String {
    let find = |view: &View| {
        view.lines(pod, container)
            .iter()
            .find(|line| matches(line))
            .cloned()
    };
    sandbox
        .wait(
            &format!("{}[{container}] prints {what}", pod.full_name()),
            READY_TIMEOUT,
            find,
        )
        .expect("the line is logged")
}

/// Waits for a line of any controller that contains these texts.
pub fn controller_logs(sandbox: &Sandbox, parts: &[&str]) {
    let pods = sandbox.view().pods_of("service-mesh", "controller");
    let find = |view: &View| {
        let mut lines = pods.iter().flat_map(|pod| view.lines(pod, "controller"));
        let is_it = |line: &&String| parts.iter().all(|part| line.contains(part));
        lines.find(is_it).cloned()
    };
    let what = format!("a controller logs {parts:?}");
    let found = sandbox.wait(&what, READY_TIMEOUT, find);
    found.expect("the line is logged");
}

/// Sends `GET /hello` from the container `shell` of a pod until the status is 200, and returns the
/// response. The first requests may fail: rules and proxies learn of a ready endpoint with a delay.
pub fn get(sandbox: &Sandbox, pod: &PodView, host: &str, port: u16) -> String {
    let is_ok = |response: &str| response.starts_with("HTTP/1.1 200 ");
    request_until(sandbox, pod, "GET /hello", (host, port), "", is_ok).stdout
}

/// Sends `POST /hello` from the container `shell` of a pod until there is a response with any
/// status.
pub fn post(sandbox: &Sandbox, pod: &PodView, host: &str, port: u16) -> Output {
    let is_any = |response: &str| !response.is_empty();
    let fields = "Content-Length: 0\\r\\n";
    request_until(sandbox, pod, "POST /hello", (host, port), fields, is_any)
}

/// Sends requests with bash until `is_expected` accepts a response. `what` is the method and the
/// target, `fields` are header fields with `\\r\\n` at the end of each.
pub fn request_until(
    sandbox: &Sandbox,
    pod: &PodView,
    what: &str,
    (host, port): (&str, u16),
    fields: &str,
    is_expected: impl Fn(&str) -> bool,
) -> Output {
    // It is the format of printf.
    let what = what.replace('%', "%%");
    let request =
        format!("{what} HTTP/1.1\\r\\nHost: {host}\\r\\n{fields}Connection: close\\r\\n\\r\\n");
    let script = format!("exec 3<>/dev/tcp/{host}/{port} && printf '{request}' >&3 && cat <&3");
    let deadline = Instant::now() + READY_TIMEOUT;
    loop {
        let output = self::script(sandbox, pod, "shell", &script);
        if is_expected(&output.stdout) {
            return output;
        }
        assert!(
            Instant::now() < deadline,
            "{what} {host}:{port}: no such response: {output:?}"
        );
    }
}

/// Sends a GET request to Service shop/web until the response begins with this status and contains
/// this text, and returns it: routes reach proxies with a delay.
pub fn response_until(
    sandbox: &Sandbox,
    pod: &PodView,
    target: &str,
    fields: &str,
    expected: &str,
) -> String {
    let (status, text) = expected.split_once(' ').unwrap_or((expected, ""));
    let is_expected = |response: &str| {
        response.starts_with(&format!("HTTP/1.1 {status} ")) && response.contains(text)
    };
    let (request, service) = (format!("GET {target}"), ("web.shop", 80));
    request_until(sandbox, pod, &request, service, fields, is_expected).stdout
}

/// Sends requests to Service shop/web on one connection, and returns the number of responses of
/// version 1.0 and of version 2.0.
pub fn versions(sandbox: &Sandbox, pod: &PodView, count: usize) -> [usize; 2] {
    let responses = requests(sandbox, pod, "/hello", count);
    ["Version: 1.0", "Version: 2.0"].map(|version| responses.matches(version).count())
}

/// Sends `GET` requests to Service shop/web on one connection, from the container `shell` of a pod,
/// and returns the responses.
pub fn requests(sandbox: &Sandbox, pod: &PodView, target: &str, count: usize) -> String {
    requests_to(sandbox, pod, "web.shop", target, count)
}

/// The same to port 80 of another host.
pub fn requests_to(
    sandbox: &Sandbox,
    pod: &PodView,
    host: &str,
    target: &str,
    count: usize,
) -> String {
    let script = format!(
        "exec 3<>/dev/tcp/{host}/80
         for ((i = 1; i < {count}; i++)); do
             printf 'GET {target} HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n' >&3
         done
         printf 'GET {target} HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n' >&3
         cat <&3"
    );
    run(sandbox, pod, &script)
}

/// Runs a script with bash in the container `shell` of a pod, and returns its output.
pub fn run(sandbox: &Sandbox, pod: &PodView, text: &str) -> String {
    script(sandbox, pod, "shell", text).stdout
}

/// Runs a script with bash in a container. Fails if the script does not end: its output would be
/// incomplete.
pub fn script(sandbox: &Sandbox, pod: &PodView, container: &str, text: &str) -> Output {
    let limit = READY_TIMEOUT.as_secs().to_string();
    let command = ["timeout", &limit, "bash", "-c", text];
    let output = sandbox.exec(pod, container, &command);
    let output = output.expect("the program runs");
    let Output {
        code,
        stdout,
        stderr,
    } = &output;
    assert_ne!(
        *code,
        TIMEOUT_CODE,
        "not completed after {limit} s, with {} bytes of output: {text}\n{stderr}",
        stdout.len()
    );
    output
}

/// A metric of the proxy of a pod.
pub fn metric(sandbox: &Sandbox, pod: &PodView, name: &str) -> u64 {
    let page = sandbox.admin_page(pod, "/metrics");
    let metrics = page.expect("the proxy responds").body;
    let prefix = format!("diy_mesh_proxy_{name} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&prefix));
    let line = line.unwrap_or_else(|| panic!("{name}: {metrics}"));
    line.parse().expect("the value is a number")
}

/// Waits until the proxy of a pod has no outbound connection. Its metrics then contain all
/// exchanges: it counts the last one of a connection after the response.
pub fn wait_for_idle_proxy(sandbox: &Sandbox, pod: &PodView) {
    let deadline = Instant::now() + READY_TIMEOUT;
    while metric(sandbox, pod, "connections_open{direction=\"outbound\"}") > 0 {
        assert!(Instant::now() < deadline, "a connection stays open");
    }
}

/// The pod in which [`mesh`] runs, with a token of the account that may list all pods.
const VIEWER: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: mesh-viewer, namespace: service-mesh}
spec:
  selector: {matchLabels: {app: mesh-viewer}}
  template:
    metadata: {labels: {app: mesh-viewer}}
    spec:
      serviceAccountName: mesh-viewer
      containers:
        - name: viewer
          image: diy-sm-controller:dev
          command: [sleep, infinity]
          volumeMounts: [{name: credentials, mountPath: /run/credentials}]
      volumes:
        - name: credentials
          projected:
            sources:
              - serviceAccountToken: {audience: diy-service-mesh, expirationSeconds: 3600, path: token}
              - configMap: {name: diy-service-mesh-roots}
      terminationGracePeriodSeconds: 1
";

/// Runs `mesh` as the account that may list all pods, with the URLs of all ready controllers.
pub fn mesh(sandbox: &Sandbox, command: &[&str]) -> Output {
    let viewers = || sandbox.view().pods_of("service-mesh", "mesh-viewer");
    if viewers().is_empty() {
        sandbox.apply(VIEWER).expect("the viewer is applied");
        let ready = |view: &View| {
            let mut pods = view.pods_of("service-mesh", "mesh-viewer").into_iter();
            pods.find(|pod| pod.ready)
        };
        let viewer = sandbox.wait("the viewer", READY_TIMEOUT, ready);
        viewer.expect("the viewer gets ready");
    }
    let mut controllers = sandbox.view().pods_of("service-mesh", "controller");
    controllers.retain(|pod| pod.ready);
    let urls = controllers
        .iter()
        .filter_map(|pod| Some(format!("--controller=https://{}:8080", pod.ip.as_ref()?)));
    let urls: Vec<String> = urls.collect();
    let files = [
        "--token-file=/run/credentials/token",
        "--roots-file=/run/credentials/roots.pem",
    ];
    let arguments: Vec<&str> = ["mesh"]
        .iter()
        .chain(command)
        .chain(&files)
        .copied()
        .chain(urls.iter().map(String::as_str))
        .collect();
    sandbox
        .exec(&viewers()[0], "viewer", &arguments)
        .expect("the program runs")
}

/// Output of `mesh identity`.
pub fn identity(sandbox: &Sandbox) -> Value {
    let output = mesh(sandbox, &["identity", "--output=json"]);
    assert_eq!(output.code, 0, "{output:?}");
    serde_json::from_str(&output.stdout).expect("the output is JSON")
}

/// Waits until the output of `mesh identity` matches, and returns it.
pub fn identity_when(
    sandbox: &Sandbox,
    what: &str,
    within: Duration,
    mut matches: impl FnMut(&Value) -> bool,
) -> Value {
    let deadline = Instant::now() + within;
    loop {
        let now = identity(sandbox);
        if matches(&now) {
            return now;
        }
        assert!(
            Instant::now() < deadline,
            "timeout waiting for {what}: {now:#}"
        );
        thread::sleep(Duration::from_millis(200));
    }
}

/// Runs `action` under load from `client` to http-server and asserts that no request fails. Each
/// load is a number of workers and the number of requests per connection.
pub fn under_load(sandbox: &Sandbox, client: &PodView, loads: &[[&str; 2]], action: impl FnOnce()) {
    let failures = failures_under_load(sandbox, client, loads, action);
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Like [`under_load`]. Returns the failures.
pub fn failures_under_load(
    sandbox: &Sandbox,
    client: &PodView,
    loads: &[[&str; 2]],
    action: impl FnOnce(),
) -> Vec<String> {
    get(sandbox, client, "http-server.servers", 80);
    // The file of an earlier load.
    let removed = sandbox.exec(client, "shell", &["rm", "-f", "/tmp/stop"]);
    removed.expect("the program runs");
    thread::scope(|scope| {
        let load = |[workers, requests]: [&str; 2]| {
            let argv = [
                "sandbox-load",
                "http-server.servers:80",
                "/hello",
                workers,
                requests,
            ];
            sandbox.exec(client, "shell", &argv).expect("the load runs")
        };
        let running: Vec<_> = loads
            .iter()
            .map(|each| scope.spawn(move || load(*each)))
            .collect();
        let stop = StopLoad { sandbox, client };
        // The servers log requests: the load is running.
        let servers = sandbox.view().pods_of("servers", "http-server");
        let requests = |view: &View, pod: &PodView| {
            view.lines(pod, "http-server")
                .iter()
                .filter(|line| line.starts_with("Request #"))
                .count()
        };
        let is_running = |view: &View| {
            servers
                .iter()
                .all(|pod| requests(view, pod) > 100)
                .then_some(())
        };
        sandbox
            .wait("the load", READY_TIMEOUT, is_running)
            .expect("the load starts");
        action();
        drop(stop);
        let mut failures = Vec::new();
        for load in running {
            let load = load.join().expect("the thread does not panic");
            let mut lines: Vec<String> = load.stdout.lines().map(str::to_owned).collect();
            let last = lines.pop().unwrap_or_default();
            assert!(
                last.starts_with("ok=") && !last.starts_with("ok=0 "),
                "{}{}",
                load.stdout,
                load.stderr
            );
            println!("{last}");
            failures.append(&mut lines);
        }
        failures
    })
}

/// Repeats `repeated` on another thread until `action` ends, at least once.
pub fn repeat_during(repeated: impl Fn() + Sync, action: impl FnOnce()) {
    /// Ends the repetition on drop, also if the action panics.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            repeated();
            while !has_ended.load(Relaxed) {
                repeated();
            }
        });
        let _end = End(&has_ended);
        action();
    });
}

/// Stops the load on drop, also if a test panics.
struct StopLoad<'a> {
    sandbox: &'a Sandbox,
    client: &'a PodView,
}

impl Drop for StopLoad<'_> {
    fn drop(&mut self) {
        let stop = self
            .sandbox
            .exec(self.client, "shell", &["touch", "/tmp/stop"]);
        assert!(
            thread::panicking() || stop.as_ref().is_ok_and(|stop| stop.code == 0),
            "{stop:?}"
        );
    }
}
