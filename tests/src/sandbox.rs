//! What the tests in a sandbox share: starting one, the mesh in it, small workloads, and waiting for what they say. A test that
//! has no means for a sandbox says so and passes at home; where CI is set it fails.

use std::{
    env,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use diy_mesh::sandbox::{
    Error, Sandbox, View, manifest,
    protocol::{Output, PodView},
};
use serde_json::{Value, json};

/// Long enough for a loaded machine; nothing waits for it that works.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// An empty sandbox, or none on a machine that cannot have one.
pub fn empty() -> Option<Sandbox> {
    match Sandbox::start(&programs()) {
        Ok(sandbox) => Some(sandbox),
        Err(Error::Launch(reason)) => {
            assert!(
                env::var_os("CI").is_none_or(|value| value != "true"),
                "CI must be able to run this: {reason}"
            );
            eprintln!("SKIPPED: {reason}");
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// A sandbox with the control plane of the real manifests, and with these further objects; everything is ready.
pub fn with_mesh(yaml: &str) -> Option<Sandbox> {
    with_controller(&[], yaml)
}

/// The same, and the controllers have these variables.
pub fn with_controller(env: &[(&str, &str)], yaml: &str) -> Option<Sandbox> {
    let sandbox = empty()?;
    let mut objects = manifest::embedded()
        .objects()
        .expect("the embedded manifests are valid");
    let own = ["http-client", "http-server", "grpc-client", "grpc-server"];
    objects.retain(|object| {
        !own.iter()
            .any(|&name| object["metadata"]["namespace"] == name)
    });
    for object in objects.iter_mut().filter(|object| {
        object["kind"] == "Deployment" && object["metadata"]["name"] == "controller"
    }) {
        let variables = object
            .pointer_mut("/spec/template/spec/containers/0/env")
            .and_then(Value::as_array_mut);
        let variables = variables.expect("the controller has variables");
        variables.extend(
            env.iter()
                .map(|(name, value)| json!({"name": name, "value": value})),
        );
    }
    sandbox.apply_objects(objects).expect("the mesh is applied");
    // Proxies that start before their controller answers say so.
    sandbox.wait_settled(PATIENCE).expect("the mesh gets ready");
    sandbox.apply(yaml).expect("the test's objects are applied");
    sandbox
        .wait_settled(PATIENCE)
        .expect("everything gets ready");
    Some(sandbox)
}

/// A sandbox with all of the walkthrough; everything is ready.
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
        .wait_settled(PATIENCE)
        .expect("everything gets ready");
    Some(sandbox)
}

/// The folder of the programs that the workspace builds.
pub fn programs() -> PathBuf {
    let own = env::current_exe().expect("a test knows its own path");
    let folder = own
        .parent()
        .and_then(std::path::Path::parent)
        .expect("tests lie in target/PROFILE/deps")
        .to_owned();
    for program in [
        "mesh",
        "controller",
        "injector",
        "proxy",
        "proxy-init",
        "http-client",
        "http-server",
        "grpc-client",
        "grpc-server",
    ] {
        assert!(
            folder.join(program).is_file(),
            "{program} is not in {}: run `cargo build --bins` first",
            folder.display()
        );
    }
    folder
}

/// A Deployment of http-server and its Service, in its namespace `servers`.
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

/// A Deployment that does nothing but be there to run programs in, in its namespace `clients`.
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

/// The annotation with which a pod asks for the mesh.
pub const MESHED: &str = "diy-service-mesh/inject: 'true'";

/// The only pod of a workload.
pub fn pod_of(sandbox: &Sandbox, namespace: &str, workload: &str) -> PodView {
    let pods = sandbox.view().pods_of(namespace, workload);
    assert_eq!(pods.len(), 1, "pods of {namespace}/{workload}");
    pods.into_iter().next().expect("there is one")
}

/// Waits until a container has printed a line that fits, and gives it.
pub fn wait_line(
    sandbox: &Sandbox,
    pod: &PodView,
    container: &str,
    what: &str,
    fits: impl Fn(&str) -> bool,
) -> String {
    let find = |view: &View| {
        view.lines(pod, container)
            .iter()
            .find(|line| fits(line))
            .cloned()
    };
    sandbox
        .wait(
            &format!("{}[{container}] prints {what}", pod.full_name()),
            PATIENCE,
            find,
        )
        .expect("the line comes")
}

/// Calls a URL from a pod, with the shell's own means, until it answers with status 200, and gives status line, headers and
/// body. The first calls may fail: readiness reaches rules and proxies a moment after it is there.
pub fn get(
    sandbox: &Sandbox,
    pod: &PodView,
    container: &str,
    host: &str,
    port: u16,
    path: &str,
) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let output = call(
            sandbox,
            pod,
            container,
            &format!("GET {path}"),
            host,
            port,
            "",
        );
        if output.stdout.starts_with("HTTP/1.1 200 ") {
            return output.stdout;
        }
        assert!(
            Instant::now() < deadline,
            "{host}:{port}{path} still answers {output:?}"
        );
    }
}

/// Posts nothing to a URL from a pod, until there is an answer, whatever it is: a new server reaches the rules of its Service a moment
/// after it is ready.
pub fn post(
    sandbox: &Sandbox,
    pod: &PodView,
    container: &str,
    host: &str,
    port: u16,
    path: &str,
) -> Output {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let output = call(
            sandbox,
            pod,
            container,
            &format!("POST {path}"),
            host,
            port,
            "Content-Length: 0\\r\\n",
        );
        if !output.stdout.is_empty() {
            return output;
        }
        assert!(
            Instant::now() < deadline,
            "{host}:{port}{path} does not answer: {output:?}"
        );
    }
}

fn call(
    sandbox: &Sandbox,
    pod: &PodView,
    container: &str,
    what: &str,
    host: &str,
    port: u16,
    fields: &str,
) -> Output {
    let request =
        format!("{what} HTTP/1.1\\r\\nHost: {host}\\r\\n{fields}Connection: close\\r\\n\\r\\n");
    let script = format!("exec 3<>/dev/tcp/{host}/{port} && printf '{request}' >&3 && cat <&3");
    sandbox
        .exec(pod, container, &["timeout", "20", "bash", "-c", &script])
        .expect("the program is run")
}

/// Runs `mesh` in the pod of a controller that is ready, told of all that are.
pub fn mesh(sandbox: &Sandbox, command: &[&str]) -> Output {
    let mut controllers = sandbox.view().pods_of("service-mesh", "controller");
    controllers.retain(|pod| pod.ready);
    let urls = controllers
        .iter()
        .filter_map(|pod| Some(format!("--controller=http://{}:8081", pod.ip.as_ref()?)));
    let urls: Vec<String> = urls.collect();
    let arguments: Vec<&str> = ["mesh"]
        .iter()
        .chain(command)
        .copied()
        .chain(urls.iter().map(String::as_str))
        .collect();
    let controller = controllers.first().expect("a controller is ready");
    sandbox
        .exec(controller, "controller", &arguments)
        .expect("the program is run")
}

/// What `mesh identity` says.
pub fn identity(sandbox: &Sandbox) -> Value {
    let output = mesh(sandbox, &["identity", "--output=json"]);
    assert_eq!(output.code, 0, "{output:?}");
    serde_json::from_str(&output.stdout).expect("the output is JSON")
}

/// What `mesh identity` says once it fits.
pub fn identity_when(
    sandbox: &Sandbox,
    what: &str,
    within: Duration,
    mut fits: impl FnMut(&Value) -> bool,
) -> Value {
    let deadline = Instant::now() + within;
    loop {
        let now = identity(sandbox);
        if fits(&now) {
            return now;
        }
        assert!(Instant::now() < deadline, "not {what}: {now:#}");
        thread::sleep(Duration::from_millis(200));
    }
}

/// Calls http-server from `client` while `action` runs, and from before it until after it: no request may fail. Each load is a
/// number of workers, and how many requests they send on one connection.
pub fn under_load(sandbox: &Sandbox, client: &PodView, loads: &[[&str; 2]], action: impl FnOnce()) {
    get(
        sandbox,
        client,
        "shell",
        "http-server.servers",
        80,
        "/hello",
    );
    thread::scope(|scope| {
        let load = |[workers, requests]: [&str; 2]| {
            let argv = [
                "sandbox-load",
                "http-server.servers:80",
                "/hello",
                workers,
                requests,
            ];
            sandbox
                .exec(client, "shell", &argv)
                .expect("the load is run")
        };
        let running: Vec<_> = loads
            .iter()
            .map(|each| scope.spawn(move || load(*each)))
            .collect();
        let stop = StopLoad { sandbox, client };
        // The servers print what reaches them: the load has begun.
        let servers = sandbox.view().pods_of("servers", "http-server");
        let requests = |view: &View, pod: &PodView| {
            view.lines(pod, "http-server")
                .iter()
                .filter(|line| line.starts_with("Request #"))
                .count()
        };
        let begun = |view: &View| {
            servers
                .iter()
                .all(|pod| requests(view, pod) > 100)
                .then_some(())
        };
        sandbox
            .wait("the load", PATIENCE, begun)
            .expect("the load begins");
        action();
        drop(stop);
        for load in running {
            let load = load.join().expect("it does not panic");
            let last = load.stdout.lines().last().unwrap_or_default();
            assert!(
                last.starts_with("ok=")
                    && !last.starts_with("ok=0 ")
                    && last.ends_with(" failed=0"),
                "{}{}",
                load.stdout,
                load.stderr
            );
            println!("{last}");
        }
    });
}

/// Ends the load, also where a test fails in the midst of it.
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
