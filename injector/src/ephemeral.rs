//! Certificates that live as long as this process: for the sandbox, and wherever else there is no Kubernetes API.
//!
//! The CA is written to a file, for whoever calls the webhook. Keys never leave the memory.

use std::path::Path;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::sleep;

use crate::certificate::{Material, Names};
use crate::keeper::{Error, Keeper};
use crate::server::stopped;

/// How often it looks whether a certificate is due.
const INTERVAL: Duration = Duration::from_secs(60);

/// Makes the certificates, and returns once they can be used.
pub async fn start(keeper: &Keeper, names: &Names, ca_file: &Path) -> Result<Material, Error> {
    let material = Material::new(names, SystemTime::now())?;
    write(ca_file, &material.bundle()).await?;
    keeper.serve(&material)?;
    keeper.health.ready_until(material.serving_ends());
    Ok(material)
}

/// Renews them until told to stop.
pub async fn keep(
    keeper: &Keeper,
    names: &Names,
    ca_file: &Path,
    mut material: Material,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return,
            () = sleep(INTERVAL) => {}
        }
        match renew(keeper, names, ca_file, &material).await {
            Ok(None) => {}
            Ok(Some(renewed)) => material = renewed,
            Err(error) => tracing::error!(%error, "certificates are due and cannot be renewed"),
        }
    }
}

async fn renew(
    keeper: &Keeper,
    names: &Names,
    ca_file: &Path,
    material: &Material,
) -> Result<Option<Material>, Error> {
    let Some(renewed) = material.renewed(names, SystemTime::now())? else {
        return Ok(None);
    };
    write(ca_file, &renewed.bundle()).await?;
    keeper.serve(&renewed)?;
    keeper.health.ready_until(renewed.serving_ends());
    Ok(Some(renewed))
}

/// Readers see the old file or the new one, never a part.
async fn write(path: &Path, text: &str) -> Result<(), Error> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let failed = |error| Error::CaFile(path.to_owned(), error);
    tokio::fs::write(&temporary, text).await.map_err(failed)?;
    tokio::fs::rename(&temporary, path).await.map_err(failed)
}
