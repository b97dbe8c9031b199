// Package conformance runs the Gateway API's conformance tests for meshes on the cluster of KUBECONFIG, which has the mesh.
package conformance

import (
	"bytes"
	"io/fs"
	"regexp"
	"testing"
	"testing/fstest"

	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// The image of echo/, as `make conformance-image` builds it.
const image = "diy-sm-conformance:dev"

func TestConformance(t *testing.T) {
	options := conformance.DefaultOptions(t)
	options.ConformanceProfiles = sets.New(suite.MeshHTTPConformanceProfileName, suite.MeshGRPCConformanceProfileName)
	options.NamespaceLabels = map[string]string{"diy-service-mesh/inject": "enabled"}
	options.SupportedFeatures = suite.FeaturesSet{}
	for _, supported := range []sets.Set[features.Feature]{
		features.MeshCoreFeatures, features.MeshExtendedFeatures,
		features.HTTPRouteCoreFeatures, features.HTTPRouteExtendedFeatures, features.GRPCRouteCoreFeatures,
	} {
		for feature := range supported {
			options.SupportedFeatures.Insert(feature.Name)
		}
	}
	manifests, err := withImage()
	if err != nil {
		t.Fatal(err)
	}
	options.ManifestFS = []fs.FS{manifests, &conformance.Manifests}
	conformance.RunConformanceWithOptions(t, options)
}

// withImage returns the suite's own manifests of the applications, with our image in place of the published one.
func withImage() (fs.FS, error) {
	const path = "mesh/manifests.yaml"
	published, err := conformance.Manifests.ReadFile(path)
	if err != nil {
		return nil, err
	}
	line := regexp.MustCompile(`(?m)^(\s*image:).*$`)
	ours := line.ReplaceAll(published, []byte("${1} "+image))
	return fstest.MapFS{path: &fstest.MapFile{Data: bytes.TrimSpace(ours)}}, nil
}
