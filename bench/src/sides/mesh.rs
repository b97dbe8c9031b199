//! Our two proxies, with the real controller.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use anyhow::Result;

use super::{
    ADMIN_PORT, INBOUND_PORT, OUTBOUND_PORT, Proxies,
    control::{Workload, roots_file},
    copy_for_proxy_user,
};
use crate::{
    config::Programs,
    network::{CONTROL, Namespace, Pair},
    process::{PROXY_UID, Process, Program},
};

/// Starts both proxies and waits until they are ready.
pub(super) fn start(programs: &Programs, pair: &Pair, dumps: bool) -> Result<Proxies> {
    let proxy = copy_for_proxy_user(&programs.proxy, &programs.state)?;
    let one = |workload: Workload, namespace: &Namespace| {
        let mut process = Process::start(
            program(&proxy, &programs.state, workload, dumps),
            namespace,
            &programs.state,
        )?;
        let ready = process.wait_ready(
            namespace,
            SocketAddr::from((Ipv4Addr::LOCALHOST, ADMIN_PORT)),
            "/ready",
        )?;
        anyhow::Ok((process, ready))
    };
    let (server, _) = one(Workload::Server, &pair.server)?;
    let (client, ready) = one(Workload::Client, &pair.client)?;
    Ok(Proxies {
        client,
        server,
        ready,
    })
}

fn program(proxy: &Path, state: &Path, workload: Workload, dumps: bool) -> Program {
    let mut arguments = Vec::new();
    for (flag, port) in [
        ("--inbound-port", INBOUND_PORT),
        ("--outbound-port", OUTBOUND_PORT),
        ("--admin-port", ADMIN_PORT),
    ] {
        arguments.extend([flag.to_string(), port.to_string()]);
    }
    arguments.extend(["--workers".to_string(), "1".to_string()]);
    let dump = if dumps { "full" } else { "off" };
    arguments.extend(["--dump".to_string(), dump.to_string()]);
    Program {
        name: format!(
            "{}-proxy-{}",
            if dumps { "dumps" } else { "mesh" },
            workload.name()
        ),
        path: proxy.to_path_buf(),
        arguments,
        environment: vec![
            ("SERVICE_MESH_CONTROLLER", format!("https://{CONTROL}:8080")),
            (
                "SERVICE_MESH_CONTROLLER_IDENTITY",
                "spiffe://cluster.local/ns/service-mesh/sa/controller".to_string(),
            ),
            (
                "SERVICE_MESH_ROOTS_FILE",
                roots_file(state).to_string_lossy().into_owned(),
            ),
            (
                "SERVICE_MESH_TOKEN_FILE",
                workload.token_file(state).to_string_lossy().into_owned(),
            ),
            ("POD_NAME", workload.name().to_string()),
            ("POD_NAMESPACE", workload.name().to_string()),
        ],
        uid: PROXY_UID,
    }
}
