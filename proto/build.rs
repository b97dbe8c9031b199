//! Compiles the .proto files with protox, which does not require protoc.

/// Messages in the JSON output of the command line, with those inside.
const SERIALIZE: &str = "#[derive(serde::Serialize)]";
/// Messages in files that the command line reads, and with the fields of objects.
const DESERIALIZE: &str = "#[derive(serde::Deserialize)] #[serde(default)]";
/// Messages in a page of the proxy that the command line reads.
const PAGE: &str = "#[derive(serde::Serialize, serde::Deserialize)] #[serde(default)]";
const ONE_OF: &str = "#[derive(serde::Deserialize)] #[serde(rename_all = \"snake_case\")]";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "mesh/v1/mesh.proto",
        "echo/v1/echo.proto",
        "envoy/service/auth/v3/authorization.proto",
        "opentelemetry/collector/trace/v1/trace_service.proto",
    ];
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure()
        // As derived for messages without lists of messages.
        .message_attribute("HeaderModifier", "#[derive(Eq, Hash)]")
        .message_attribute("RouteMatch", "#[derive(Eq, Hash)]")
        .message_attribute("RouteFilter", "#[derive(Eq, Hash)]")
        .message_attribute("RouteBackend", "#[derive(Eq, Hash)]")
        .message_attribute("RouteRule", "#[derive(Eq, Hash)]")
        .type_attribute("RouteFilter.kind", "#[derive(Eq, Hash)]")
        .message_attribute(".mesh.v1.GetIdentityResponse", SERIALIZE)
        .message_attribute(".mesh.v1.GetRoutesResponse", SERIALIZE)
        .field_attribute("GetRoutesResponse.next_page_token", "#[serde(skip)]")
        .message_attribute(".mesh.v1.Exceptions", SERIALIZE)
        .message_attribute(".mesh.v1.HeaderModifier", DESERIALIZE)
        .message_attribute(".mesh.v1.GetEdgesResponse", DESERIALIZE)
        .message_attribute(".mesh.v1.Edge", DESERIALIZE)
        .message_attribute(".mesh.v1.SilentConnection", DESERIALIZE)
        .message_attribute(".mesh.v1.Workload.Port", DESERIALIZE)
        .message_attribute(".mesh.v1.AuthorizedPath", DESERIALIZE)
        .type_attribute(".mesh.v1.Edge.path", ONE_OF)
        .type_attribute(".mesh.v1.AuthorizedPath.kind", ONE_OF)
        .message_attribute(".mesh.v1.Traffic", PAGE)
        // In a certain order: equal messages are equal bytes.
        .btree_map("GetEdgesResponse.Group.labels")
        .btree_map("Service.Endpoint.ports")
        .compile_fds(descriptors)?;
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    Ok(())
}
