//! Two proxies of another project, configured as sidecars: mutual TLS, one worker thread, a static
//! configuration, access logs off.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, SanType,
};

use super::{Proxies, copy_for_proxy_user, write_readable};
use crate::{
    config::Programs,
    network::{Namespace, Pair},
    process::{PROXY_UID, Process, Program},
};

/// Where both proxies answer `/ready`.
const READY: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 9901);

/// A proxy that is compared with the mesh. In its configurations, `STATE` stands for the directory
/// with the certificates.
pub(super) struct Peer {
    pub name: &'static str,
    pub program: PathBuf,
    pub client: &'static str,
    pub server: &'static str,
    /// The arguments, up to the name of the configuration file.
    pub arguments: &'static [&'static str],
}

impl Peer {
    /// Starts both proxies and waits until they are ready.
    pub(super) fn start(&self, programs: &Programs, pair: &Pair) -> Result<Proxies> {
        let program = copy_for_proxy_user(&self.program, &programs.state)?;
        write_identities(&programs.state)?;
        let start = |role: &str, config: &str, namespace: &Namespace| {
            let name = format!("{}-{role}", self.name);
            // Envoy accepts YAML in files with this extension only.
            let file = programs.state.join(format!("{name}.yaml"));
            let config = config.replace("STATE", &programs.state.to_string_lossy());
            write_readable(&file, &config)?;
            let mut arguments: Vec<_> =
                self.arguments.iter().map(|text| text.to_string()).collect();
            arguments.push(file.to_string_lossy().into_owned());
            let program = Program {
                name,
                path: program.clone(),
                arguments,
                environment: Vec::new(),
                uid: PROXY_UID,
            };
            let mut process = Process::start(program, namespace, &programs.state)?;
            let ready = process.wait_ready(namespace, SocketAddr::from(READY), "/ready")?;
            anyhow::Ok((process, ready))
        };
        let (server, _) = start("server", self.server, &pair.server)?;
        let (client, ready) = start("client", self.client, &pair.client)?;
        Ok(Proxies {
            ends: [Some(client), Some(server)],
            ready,
        })
    }
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
    write_readable(&state.join("peer-ca.crt"), &issuer.pem())?;
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
        let (certificate, key) = (certificate.pem(), key.serialize_pem());
        write_readable(&state.join(format!("{name}.crt")), &certificate)?;
        write_readable(&state.join(format!("{name}.key")), &key)?;
        write_readable(&state.join(format!("{name}.pem")), &(certificate + &key))?;
    }
    Ok(())
}
