//! Contracts between the components of the mesh: generated gRPC types, workload identities, and
//! shared constants. No logic.

/// API of the controller: discovery and certificates.
pub mod mesh {
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("mesh.v1");
    }
}

/// API of the sample gRPC application.
pub mod echo {
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("echo.v1");
    }
}

pub mod identity;
pub mod status;

pub use identity::Identity;

/// Audience of the service account tokens that authenticate workloads to the controller.
pub const TOKEN_AUDIENCE: &str = "diy-service-mesh";
