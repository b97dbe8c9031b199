// Package conformance runs the Gateway API's conformance tests for meshes on the cluster of KUBECONFIG, which has the mesh.
package conformance

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// The image of echo/, as `make conformance-image` builds it.
const image = "diy-sm-conformance:dev"

// supported are the features that docs/gateway-api.md lists.
var supported = []sets.Set[features.Feature]{
	features.MeshCoreFeatures, features.MeshExtendedFeatures,
	features.HTTPRouteCoreFeatures, features.HTTPRouteExtendedFeatures,
	features.GRPCRouteCoreFeatures, features.GRPCRouteExtendedFeatures,
}

func TestFeaturesAreDocumented(t *testing.T) {
	document, err := os.ReadFile("../../docs/gateway-api.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range supported {
		for feature := range set {
			if !strings.Contains(string(document), fmt.Sprintf("\n| `%s` | supported", feature.Name)) {
				t.Errorf("docs/gateway-api.md has no row for %s", feature.Name)
			}
		}
	}
}

func TestConformance(t *testing.T) {
	var names []string
	for _, set := range supported {
		for feature := range set {
			names = append(names, string(feature.Name))
		}
	}
	// The types of these options differ between the versions of the suite, those of the flags do not.
	for name, value := range map[string]string{
		"conformance-profiles": "MESH-HTTP,MESH-GRPC",
		"supported-features":   strings.Join(names, ","),
	} {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	options := conformance.DefaultOptions(t)
	options.NamespaceLabels = map[string]string{"diy-service-mesh/inject": "enabled"}
	options.ManifestFS = []fs.FS{manifests{}}
	conformance.RunConformanceWithOptions(t, options)
}

// manifests are those of the suite, with our image in place of the published one of the applications. Version 1.5's test of status
// 307 names the route of status 303, and gets both.
type manifests struct{}

func (manifests) Open(name string) (fs.File, error) {
	content, err := conformance.Manifests.ReadFile(name)
	if err != nil {
		return nil, err
	}
	switch name {
	case "mesh/manifests.yaml":
		content = regexp.MustCompile(`(?m)^(\s*image:).*$`).ReplaceAll(content, []byte("${1} "+image))
	case "tests/mesh/httproute-303-redirect.yaml":
		other, err := conformance.Manifests.ReadFile("tests/mesh/httproute-307-redirect.yaml")
		if err != nil {
			return nil, err
		}
		content = slices.Concat(content, []byte("\n---\n"), other)
	}
	return fstest.MapFS{name: &fstest.MapFile{Data: content}}.Open(name)
}
