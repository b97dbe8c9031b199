//! Certificates in memory, for the sandbox and other environments without a Kubernetes API.
//!
//! The CA certificate is written to a file for the clients of the webhook. Private keys stay in
//! memory.

use std::convert::Infallible;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};

use crate::certificate::{KeyMaterial, Names};
use crate::publish::{Error, Publisher};

const RENEWAL_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Generates certificates, publishes them and renews them. Returns only if the first ones cannot be
/// published.
pub async fn run(
    publisher: &Publisher,
    names: &Names,
    ca_file: &Path,
) -> Result<Infallible, Error> {
    let now = SystemTime::now();
    let mut material = KeyMaterial::generate(names, now)?;
    publish(publisher, ca_file, &material, now).await?;
    loop {
        sleep(RENEWAL_CHECK_INTERVAL).await;
        match renew(publisher, names, ca_file, &material).await {
            Ok(None) => {}
            Ok(Some(renewed)) => material = renewed,
            Err(error) => tracing::error!(%error, "cannot renew the certificates"),
        }
    }
}

async fn renew(
    publisher: &Publisher,
    names: &Names,
    ca_file: &Path,
    material: &KeyMaterial,
) -> Result<Option<KeyMaterial>, Error> {
    let now = SystemTime::now();
    let renewed = material.renewed(names, now)?;
    if let Some(renewed) = &renewed {
        publish(publisher, ca_file, renewed, now).await?;
    }
    Ok(renewed)
}

async fn publish(
    publisher: &Publisher,
    ca_file: &Path,
    material: &KeyMaterial,
    now: SystemTime,
) -> Result<(), Error> {
    write_atomically(ca_file, &material.bundle())
        .await
        .map_err(|error| Error::CaFile(ca_file.to_owned(), error))?;
    publisher.publish(material)?;
    let left = material.serving_not_after().duration_since(now);
    let left = left.unwrap_or_default();
    publisher.health.ready_until(Instant::now() + left);
    Ok(())
}

async fn write_atomically(path: &Path, text: &str) -> std::io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    tokio::fs::write(&temporary, text).await?;
    tokio::fs::rename(&temporary, path).await
}
