//! Full disks in a sandbox: programs continue without their logs, and name the file that they need.

use diy_mesh_sandbox::View;
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, empty, empty_with, http_server, install, shell, single_pod, under_load,
    wait_for_line,
};

use crate::wrapped::wrapped;

#[test]
fn programs_continue_while_their_logs_cannot_be_written() {
    let programs = wrapped(
        &["controller", "injector", "proxy"],
        "exec > /dev/full 2>&1; exec",
    );
    let Some(sandbox) = empty_with(programs.path()) else {
        return;
    };
    let objects = format!("{}---{}", http_server(2, "1.0", MESHED), shell(MESHED));
    install(&sandbox, |_| {}, &objects);
    let client = single_pod(&sandbox, "clients", "shell");
    let server = &sandbox.view().pods_of("servers", "http-server")[0];
    under_load(&sandbox, &client, &[["2", "50"]], || {
        sandbox.scale("servers", "http-server", 3).unwrap();
        sandbox.wait_settled(READY_TIMEOUT).unwrap();
    });
    for (pod, container) in [(&client, "proxy"), (server, "proxy")] {
        assert_eq!(sandbox.view().lines(pod, container), [""; 0]);
    }
}

/// A controller and an injector whose files are on a full disk.
const PODS: &str = "
apiVersion: v1
kind: Pod
metadata: {name: controller, namespace: full}
spec:
  containers:
    - name: controller
      image: diy-sm-controller:dev
      securityContext: {runAsUser: 0, capabilities: {add: [SYS_ADMIN, SYS_PTRACE]}}
      command: [bash, -c, 'FILL; exec controller --catalog=files:/run/sandbox/catalog
        --authenticator=jwks:/run/sandbox/jwks.json --ca=files:/tmp/full']
      readinessProbe: {httpGet: {path: /ready, port: 8081}, periodSeconds: 1}
---
apiVersion: v1
kind: Pod
metadata: {name: injector, namespace: full}
spec:
  containers:
    - name: injector
      image: diy-sm-injector:dev
      securityContext: {runAsUser: 0, capabilities: {add: [SYS_ADMIN]}}
      command: [bash, -c, 'FILL; exec injector --serving-certificate=ephemeral
        --ca-file=/tmp/full/ca.pem --namespaces-folder=/run/sandbox/namespaces
        --image-to-deploy-proxy=proxy --image-to-deploy-proxy-init=proxy-init']
";

/// Mounts a small disk, and fills it.
const FILL: &str = "mkdir -p /tmp/full && mount -t tmpfs -o size=64k full /tmp/full && \
                    ! dd if=/dev/zero of=/tmp/full/rest 2>/dev/null";

/// Frees the disk of the controller, which other processes see below its root directory.
const FREE: &str = "for process in /proc/[0-9]*; do
    read -r name < $process/comm && [[ $name = controller && $process/ns/net -ef /proc/self/ns/net ]] && rm $process/root/tmp/full/rest
done 2> /dev/null; true";

#[test]
fn full_disk_is_named_and_the_controller_continues_once_there_is_room() {
    let Some(sandbox) = empty() else {
        return;
    };
    sandbox.apply(&PODS.replace("FILL", FILL)).unwrap();
    for (name, file) in [
        ("controller", "/tmp/full/"),
        ("injector", "/tmp/full/ca.pem"),
    ] {
        let pod = |view: &View| view.pods_of("full", name).pop();
        let pod = sandbox.wait(name, READY_TIMEOUT, pod).unwrap();
        wait_for_line(&sandbox, &pod, name, "the reason", |line| {
            line.contains(file) && line.contains("No space left on device")
        });
    }
    let controller = single_pod(&sandbox, "full", "controller");
    let freed = sandbox.exec(&controller, "controller", &["bash", "-c", FREE]);
    assert_eq!(freed.unwrap().code, 0);
    let is_ready = |view: &View| {
        let mut pods = view.pods_of("full", "controller").into_iter();
        pods.any(|pod| pod.ready).then_some(())
    };
    sandbox
        .wait("the controller", READY_TIMEOUT, is_ready)
        .unwrap();
}
