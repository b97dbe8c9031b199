//! The real controller with the fake API server.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};

use super::{
    api_server::ApiServer,
    testbed::{Testbed, free_address},
};
use crate::process::{Meter, Process};

const ROOTS_TIMEOUT: Duration = Duration::from_secs(10);

/// A running controller.
pub struct Controller {
    process: Process,
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
    address: SocketAddr,
    admin: SocketAddr,
    roots: PathBuf,
}

impl Controller {
    /// Starts a controller and waits until it has published its roots.
    pub fn start(testbed: &Testbed, api: &ApiServer, program: &Path) -> Result<Controller> {
        let authority = testbed.folder().join("ca");
        fs::create_dir_all(&authority)
            .with_context(|| format!("create {}", authority.display()))?;
        let kubeconfig = testbed.write("kubeconfig", &api.kubeconfig())?;
        let (address, admin) = (free_address()?, free_address()?);
        let arguments = vec![
            format!("--listen={address}"),
            format!("--admin-listen={admin}"),
            format!("--ca=files:{}", authority.display()),
        ];
        let environment = vec![
            ("POD_NAMESPACE", "service-mesh".to_owned()),
            // As the image does.
            ("MALLOC_ARENA_MAX", "1".to_owned()),
            ("KUBECONFIG", kubeconfig.to_string_lossy().into_owned()),
        ];
        let process = testbed.start(
            "controller",
            program,
            arguments.clone(),
            environment.clone(),
            admin,
        )?;
        let roots = authority.join("roots.pem");
        let is_published = || usize::from(roots.exists());
        testbed.wait_for("published roots", 1, ROOTS_TIMEOUT, is_published)?;
        Ok(Controller {
            process,
            program: program.to_owned(),
            arguments,
            environment,
            address,
            admin,
            roots,
        })
    }

    /// Kills the controller and starts it again, with the same addresses.
    pub fn restart(&mut self, testbed: &Testbed) -> Result<()> {
        self.process.kill()?;
        let (arguments, environment) = (self.arguments.clone(), self.environment.clone());
        self.process = testbed.start(
            "controller",
            &self.program,
            arguments,
            environment,
            self.admin,
        )?;
        Ok(())
    }

    /// The URL of its gRPC server.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// File with the trust roots.
    pub fn roots(&self) -> &Path {
        &self.roots
    }

    /// Meter of its CPU time and memory.
    pub fn meter(&self) -> Meter {
        self.process.meter()
    }

    /// The last lines of its log, for errors.
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }
}
