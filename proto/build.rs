//! Compiles the .proto files with protox, which does not require protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["mesh/v1/mesh.proto", "echo/v1/echo.proto"];
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure()
        // As derived for messages without lists of messages.
        .message_attribute("HeaderModifier", "#[derive(Eq, Hash)]")
        .message_attribute("RouteMatch", "#[derive(Eq, Hash)]")
        .message_attribute("RouteFilter", "#[derive(Eq, Hash)]")
        .message_attribute("RouteBackend", "#[derive(Eq, Hash)]")
        .message_attribute("RouteRule", "#[derive(Eq, Hash)]")
        .type_attribute("RouteFilter.kind", "#[derive(Eq, Hash)]")
        // The output of `mesh identity`.
        .message_attribute(
            "GetIdentityResponse.Authority",
            "#[derive(serde::Serialize)]",
        )
        .message_attribute(
            "GetIdentityResponse.Rotation",
            "#[derive(serde::Serialize)]",
        )
        .message_attribute(
            "GetIdentityResponse.Workload",
            "#[derive(serde::Serialize)]",
        )
        .message_attribute("Exceptions", "#[derive(serde::Serialize)]")
        .message_attribute("Exceptions.Exception", "#[derive(serde::Serialize)]")
        .compile_fds(descriptors)?;
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    Ok(())
}
