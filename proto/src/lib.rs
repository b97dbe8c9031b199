//! The contracts between the mesh's parts, and nothing that decides anything: generated gRPC types, and names that both sides must agree on.

/// The controller's service: discovery and certificates.
pub mod mesh {
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("mesh.v1");
    }
}

/// The sample gRPC application's service.
pub mod echo {
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("echo.v1");
    }
}

pub mod identity;
pub mod status;

pub use identity::Identity;

/// The audience of the tokens by which workloads prove themselves to the controller.
pub const TOKEN_AUDIENCE: &str = "diy-service-mesh";
